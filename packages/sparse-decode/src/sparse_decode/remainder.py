"""What sparse attention leaves out, added back as one token (docs/algorithm.md, eq. 15 and 16).

The token's value is the mean of the visible values plus, for each query head, their covariance with the keys times the
query; its weight is estimated with the help of the mean of the visible keys. The sums that these are made of are kept
beside the cache: a decode step adds its own token to them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_decode import moments
from sparse_decode.modes import ordinary_tensors
from sparse_decode.positions import Seen, readable

_CHUNK = 1 << 26  # bytes of float64 keys or values that are summed at once, whatever the batch and the context


class Moments(NamedTuple):
    """Sums over some tokens of each sequence of a batch."""

    tokens: Tensor
    """How many tokens, float64 [B]."""
    keys: Tensor
    """Sum of their keys, float64 [B, Hkv, D]."""
    values: Tensor
    """Sum of their values, float64 [B, Hkv, Dv]."""
    spread: Tensor
    """Sum of (key - mean key)(value - mean value)^T, float32 [B, Hkv, D, Dv]: deviations, so that float32 will do."""

    @classmethod
    def none(cls, k: Tensor, v: Tensor, device: torch.device | None = None) -> Moments:
        """Return those of no token, for keys [B, Hkv, N, D] and values [B, Hkv, N, Dv]."""
        (batch, heads, _, dim), dim_v = k.shape, v.shape[3]
        device = k.device if device is None else device
        keys, values = (torch.zeros(*x.shape[:2], x.shape[3], dtype=torch.float64, device=device) for x in (k, v))
        spread = torch.zeros(batch, heads, dim, dim_v, dtype=torch.float32, device=device)
        return cls(keys.new_zeros(batch), keys, values, spread)

    @classmethod
    def of(cls, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int, device: torch.device) -> Moments:
        """Return those of tokens first..last-1 of k and v, but for padding, summed on a device."""
        tokens = max(1, _CHUNK // (8 * max(k[:, :, :1].numel(), v[:, :, :1].numel()) + 1))
        found = cls.none(k, v, device)
        for start in range(first, last, tokens):
            end = min(start + tokens, last)
            keys, values = (_shown(x, seen, start, end, device).sum(2) for x in (k, v))
            part = cls(_count(keys, seen, start, end)[:, -1].double(), keys, values, found.spread)
            keys, values = (
                _deviations(x, mean, seen, start, end) for x, mean in zip((k, v), part.means(), strict=True)
            )
            found = found.join(part._replace(spread=keys.mT @ values))
        return found

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the mean key and value, float64; zeros of no token."""
        divisor = self.tokens.clamp(min=1)[:, None, None]
        return self.keys / divisor, self.values / divisor

    def join(self, other: Moments) -> Moments:
        """Return the sums over these tokens and others."""
        whole = Moments(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))
        return whole._replace(spread=whole.spread + _between(self, other))

    def without(self, last: Moments) -> Moments:
        """Return the sums over the others of these tokens, if the `last` ones are among them."""
        rest = Moments(*(mine - theirs for mine, theirs in zip(self, last, strict=True)))
        return rest._replace(spread=rest.spread - _between(rest, last))

    def map(self, change: Callable[[Tensor], Tensor]) -> Moments:
        """Change the batch dimension of each sum."""
        return Moments(*map(change, self))


def summing_bytes(k: Tensor, v: Tensor) -> int:
    """Return the most bytes that `Moments.of` holds for a moment, for keys and values [B, Hkv, N, D].

    Those of a chunk in float64, less their mean, as float32; and the float32 of the keys beside those of the values.
    """
    each = 8 * max(k[:, :, :1].numel(), v[:, :, :1].numel())
    return min(k.shape[2] * each, max(_CHUNK, each)) * 7 // 2


class RunningMoments:
    """The sums over the first tokens of each sequence of a batch, but for tokens that nobody sees, its padding.

    It is told the same keys and values again at each call and reads those that are new.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Sum anew when next asked."""
        self.length: int = 0
        """Tokens summed so far, padding included."""
        self._sums: Moments | None = None
        self._seen: Tensor | None = None

    @torch.no_grad()
    def rows(
        self, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Say what stands for the tokens that the rows first..last-1 see, each its own token and those before it.

        Args:
            q: queries of the rows, [B, Hq, R, D]; slopes: of each query head, times the factor on the logits, [Hq].
            k, v: all keys [B, Hkv, N, D] and values [B, Hkv, N, Dv]; seen: bool [B, N], False for padding, or None.
        Returns: float32 mean keys [B, Hkv, R, D] and values [B, Hq, R, Dv] of eq. 16, and how many tokens [B, R].
        """
        before = self.advance(k, v, seen, first, q.device)
        counts = before.tokens.long()[:, None] + _count(q, seen, first, last)
        visible = counts.clamp(min=1)[:, None, :, None]
        centres = [mean[:, :, None] for mean in before.means()]
        mean_k, mean_v = (
            (total[:, :, None] + _shown(x, seen, first, last, q.device).cumsum(2)) / visible
            for total, x in ((before.keys, k), (before.values, v))
        )
        drift_k, drift_v = ((mean - centre).float() for mean, centre in zip((mean_k, mean_v), centres, strict=True))
        new_k, new_v = (
            _deviations(x, c[:, :, 0], seen, first, last)[:, :, None] for x, c in zip((k, v), centres, strict=True)
        )
        grouped = (q.float() * slopes[:, None, None]).unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, R, D]
        products = grouped @ before.spread[:, :, None] + (grouped @ new_k.mT).tril() @ new_v
        tilt = (
            products / visible[:, :, None] - (grouped * drift_k[:, :, None]).sum(-1, keepdim=True) * drift_v[:, :, None]
        )
        self._sums = before.join(Moments.of(k, v, seen, first, last, q.device))
        self._note(seen, last)
        return mean_k.float(), (mean_v.float()[:, :, None] + tilt).float().flatten(1, 2), counts

    @torch.no_grad()
    def step(
        self,
        q: Tensor,
        slopes: Tensor,
        k: Tensor,
        v: Tensor,
        sight: Seen | None = None,
        length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Return what `rows` returns for the last row, if its token alone is new.

        In one kernel. Args: as those of `rows`; sight: what the rows see, None for all. Returns: None if there is more
        to do; on a GPU, where it cannot be looked at, sums of tokens that are no longer those shown become NaN.
        """
        n, sums = k.shape[2], self._sums
        shown, visible = (None, None) if sight is None else (sight.tokens, sight.visible)
        alike = sums is not None and len(sums.keys) == len(k) and sums.keys.device == q.device
        if sums is None or not alike or self.length != n - 1:
            return None
        if not readable(q):
            if q.shape[1] > moments.MAX_GROUP * k.shape[1]:
                return None
        elif not self._same(shown, len(k)):
            return None
        query, slopes, k, v = (x.detach() for x in (q[:, :, 0], slopes, k, v))
        # Not in place: whoever was given the sums may keep them.
        add = moments.on_cpu if readable(q) else moments.OPERATORS.add_token  # there, without torch's dispatcher
        before = sums.keys, sums.values, sums.spread
        *found, mean_keys, rest = add(query, slopes, k, v, *before, visible, shown, self._seen)
        self._sums, self._seen, self.length = Moments(*found), shown, n
        return mean_keys[:, :, None], rest[:, :, None]

    def to_extend(self, batch: int, n: int) -> Moments | None:
        """Return the sums, if they are of all tokens but the last of n, in memory of the CPU; None if they are not.

        Who adds the last token to them in place says so by `extended`.
        """
        sums = self._sums
        if sums is None or self._seen is not None or self.length != n - 1 or len(sums.keys) != batch:
            return None
        return sums if sums.keys.device.type == "cpu" and all(x.is_contiguous() for x in sums) else None

    def extended(self, n: int) -> None:
        """Take the sums as those of all n tokens."""
        assert self._sums is not None
        self._sums.tokens.numpy().fill(n)  # torch does not write to what was made in inference mode outside of it
        self.length = n

    def copied(self) -> RunningMoments:
        """Return the same sums in memory of their own: steps may add to these in place."""
        twin = copy.copy(self)
        with ordinary_tensors():
            twin._sums = None if self._sums is None else self._sums.map(torch.clone)
        return twin

    def drop(self, k: Tensor, v: Tensor, length: int) -> None:
        """Take the tokens from `length` on out of the sums; k and v still hold them."""
        if length >= self.length:
            return
        if not length:
            return self.forget()
        assert self._sums is not None
        last = Moments.of(k, v, self._seen, length, self.length, self._sums.keys.device)
        self._sums = self._sums.without(last)
        self._seen = None if self._seen is None else self._seen[:, :length]
        self.length = length

    def load(self, sums: Moments, seen: Tensor) -> None:
        """Go on from sums over the tokens that `seen` [B, T] names."""
        self.length, self._sums, self._seen = seen.shape[1], sums, seen

    def store(self, sums: Moments, seen: Tensor) -> None:
        """Write the sums into tensors of their size, and into the first columns of `seen` which tokens they count."""
        if self._sums is not None:
            for room, found in zip(sums, self._sums, strict=True):
                room.copy_(found)
            seen[:, : self.length] = True if self._seen is None else self._seen

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums by a change of their batch dimension."""
        if self._sums is not None:
            self._sums = self._sums.map(change)
            self._seen = None if self._seen is None else change(self._seen)

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return 0 if self._sums is None else sum(x.nbytes for x in self._sums)

    def advance(self, k: Tensor, v: Tensor, seen: Tensor | None, length: int, device: torch.device) -> Moments:
        """Sum the tokens up to `length`, or anew if these are not the tokens that were summed."""
        if self.length > length or not self._same(seen, k.shape[0]):
            self.forget()
        if self._sums is None:
            self._sums = Moments.of(k, v, seen, 0, length, device)
        elif self.length < length:
            self._sums = self._sums.join(Moments.of(k, v, seen, self.length, length, device))
        self._note(seen, length)
        return self._sums

    def _note(self, seen: Tensor | None, length: int) -> None:
        """Remember of which tokens the sums now are."""
        self.length = length
        self._seen = None if seen is None else seen[:, :length]

    def _same(self, seen: Tensor | None, batch: int) -> bool:
        """Say whether the tokens summed so far are those that are visible now."""
        if self._sums is None:
            return True
        if len(self._sums.keys) != batch:
            return False
        before, now = self._seen, None if seen is None else seen[:, : self.length]
        if before is None or now is None:  # without a mask all are visible
            return all(x is None or bool(x.all()) for x in (before, now))
        return torch.equal(before, now)


class StaticMoments:
    """The running sums of a static cache: buffers of fixed size, so that a compiled step updates them in place.

    Attributes:
        tensors: those of `Moments`; which tokens they count, bool [B, N]; and of how many tokens they are, padding
            included, int64 [B], the same for all: on CUDA each row looks at its own.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors: list[Tensor] = list(tensors)
        self.ready: bool = False
        """Whether the sums are known to be of all tokens but those to come, so that a step need not look."""

    @classmethod
    def empty(cls, keys: Tensor, values: Tensor) -> StaticMoments:
        """Make the sums for a cache of keys [B, Hkv, N, D] and values [B, Hkv, N, Dv], of no token yet."""
        seen = keys.new_zeros(keys.shape[0], keys.shape[2], dtype=torch.bool)
        return cls(
            [*Moments.none(keys, values, keys.device), seen, keys.new_zeros(max(1, len(keys)), dtype=torch.int64)]
        )

    @torch.no_grad()
    def rows(
        self, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `RunningMoments.rows` does."""
        running = self._running()
        found = running.rows(q, slopes, k, v, seen, first, last)
        self._store(running)
        return found

    @torch.no_grad()
    def learn(self, k: Tensor, v: Tensor, seen: Tensor | None) -> None:
        """Sum all tokens of k and v, a prompt's, but for those that are not `seen` [B, N]."""
        running = self._running()
        running.advance(k, v, seen, k.shape[2], k.device)
        self._store(running)

    def _running(self) -> RunningMoments:
        running = RunningMoments()
        *sums, counted, length = self.tensors
        if n := int(length[0]):
            running.load(Moments(*sums), counted[:, :n])
        return running

    def _store(self, running: RunningMoments) -> None:
        *sums, counted, length = self.tensors
        running.store(Moments(*sums), counted)
        length.fill_(running.length)
        self.ready = True

    @torch.no_grad()
    def step(
        self, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, sight: Seen | None, length: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Do what `RunningMoments.step` does, in place; `length` has the number of tokens in the cache, int64 []."""
        if not self.ready or sight is None or length is None:
            return None
        if readable(q) and not self._is_next(sight, int(length) - 1):
            return None
        given = q[:, :, 0], slopes, k, v, *self.tensors, sight.visible, sight.tokens, length
        add = moments.on_cpu_in_place if readable(q) else moments.OPERATORS.add_in_place
        mean_keys, rest = add(*given)
        return mean_keys[:, :, None], rest[:, :, None]

    def _is_next(self, sight: Seen, at: int) -> bool:
        """Say whether the sums are of the tokens before number `at` that are visible now."""
        *_, counted, length = self.tensors
        return int(length[0]) == at and torch.equal(counted[:, :at], sight.tokens[:, :at])

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums by a change of the order of their rows."""
        for x in self.tensors[:-1]:
            x.copy_(change(x))

    def reset(self) -> None:
        """Forget all tokens."""
        self.tensors[-1].zero_()
        self.ready = False

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return sum(x.nbytes for x in self.tensors)


def _between(a: Moments, b: Moments) -> Tensor:
    """Return what the spread of tokens a and b together has beyond their own: that of their two means."""
    (keys_a, values_a), (keys_b, values_b) = a.means(), b.means()
    factor = (a.tokens * b.tokens / (a.tokens + b.tokens).clamp(min=1))[:, None, None]
    return (((keys_b - keys_a) * factor)[..., None] * (values_b - values_a)[:, :, None]).float()


def _count(x: Tensor, seen: Tensor | None, first: int, last: int) -> Tensor:
    """Count tokens first..last-1 of [B, Hkv, N, X] that are no padding, up to each: int64 [B, last - first]."""
    if seen is None:
        return torch.arange(1, last - first + 1, device=x.device).expand(len(x), -1)
    return seen[:, first:last].cumsum(-1)


def _shown(x: Tensor, seen: Tensor | None, first: int, last: int, device: torch.device) -> Tensor:
    """Return tokens first..last-1 of [B, Hkv, N, X] on a device as float64, zeros where they are padding."""
    part = x[:, :, first:last].to(device).double()
    return part if seen is None else torch.where(seen[:, None, first:last, None], part, 0.0)


def _deviations(x: Tensor, mean: Tensor, seen: Tensor | None, first: int, last: int) -> Tensor:
    """Return tokens first..last-1 of [B, Hkv, N, X] less a mean [B, Hkv, X], float32, zeros where they are padding."""
    part = (x[:, :, first:last].to(mean.device).double() - mean[:, :, None]).float()
    return part if seen is None else torch.where(seen[:, None, first:last, None], part, 0.0)
