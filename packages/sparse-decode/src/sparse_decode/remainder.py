"""The remainder: unselected tokens, added back as one token (docs/algorithm.md, eq. 15 and 16).

Its value is the mean of the visible values plus, for each query head, their covariance with the keys times the query.
Its weight is estimated from the mean of the visible keys. The sums behind these means are stored beside the cache, and
a decode step adds its own token to them.
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

_CHUNK = 1 << 26  # bytes of float64 keys or values summed per chunk, at any batch size and context length


class Moments(NamedTuple):
    """Sums over tokens of each sequence of a batch."""

    tokens: Tensor
    """Number of tokens, float64 [B]."""
    keys: Tensor
    """Sum of their keys, float64 [B, Hkv, D]."""
    values: Tensor
    """Sum of their values, float64 [B, Hkv, Dv]."""
    spread: Tensor
    """Sum of (key - mean key)(value - mean value)^T, float32 [B, Hkv, D, Dv]; float32 suffices for deviations."""

    @classmethod
    def none(cls, k: Tensor, v: Tensor, device: torch.device | None = None) -> Moments:
        """Return sums of zero tokens, for keys [B, Hkv, N, D] and values [B, Hkv, N, Dv]."""
        (batch, heads, _, dim), dim_v = k.shape, v.shape[3]
        device = k.device if device is None else device
        keys, values = (torch.zeros(*x.shape[:2], x.shape[3], dtype=torch.float64, device=device) for x in (k, v))
        spread = torch.zeros(batch, heads, dim, dim_v, dtype=torch.float32, device=device)
        return cls(keys.new_zeros(batch), keys, values, spread)

    @classmethod
    def of(cls, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int, device: torch.device) -> Moments:
        """Return the sums over tokens first..last-1 of k and v without padding, computed on `device`."""
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
        """Return the mean key and value, float64; zeros if there are no tokens."""
        divisor = self.tokens.clamp(min=1)[:, None, None]
        return self.keys / divisor, self.values / divisor

    def join(self, other: Moments) -> Moments:
        """Return the sums over the tokens of both."""
        whole = Moments(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))
        return whole._replace(spread=whole.spread + _between(self, other))

    def without(self, last: Moments) -> Moments:
        """Return the sums without the `last` tokens, which must be part of them."""
        rest = Moments(*(mine - theirs for mine, theirs in zip(self, last, strict=True)))
        return rest._replace(spread=rest.spread - _between(rest, last))

    def map(self, change: Callable[[Tensor], Tensor]) -> Moments:
        """Apply `change`, a function on the batch dimension, to each sum."""
        return Moments(*map(change, self))


def summing_bytes(k: Tensor, v: Tensor) -> int:
    """Return the peak bytes of temporaries in `Moments.of`, for keys and values [B, Hkv, N, D].

    A chunk in float64, its deviations in float64 and float32, and the deviations of keys and values in float32.
    """
    per_token = 8 * max(k[:, :, :1].numel(), v[:, :, :1].numel())
    return min(k.shape[2] * per_token, max(_CHUNK, per_token)) * 7 // 2


class RunningMoments:
    """Sums over the first tokens of each sequence of a batch, without padding.

    Each call gets all keys and values and reads only those of new tokens.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Discard the sums; the next call recomputes them."""
        self.length: int = 0
        """Tokens summed so far, padding included."""
        self._sums: Moments | None = None
        self._seen: Tensor | None = None

    @torch.no_grad()
    def rows(
        self, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean keys and values of the tokens that rows first..last-1 see: their own and all earlier ones.

        Args:
            q: queries of the rows, [B, Hq, R, D]; slopes: per query head, times the factor on the logits, [Hq].
            k, v: all keys [B, Hkv, N, D] and values [B, Hkv, N, Dv]; seen: bool [B, N], False for padding, or None.
        Returns: float32 mean keys [B, Hkv, R, D] and values [B, Hq, R, Dv] of eq. 16; numbers of tokens [B, R].
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
        """Return the means of `rows` for the last row with one kernel, if only its token is new.

        Args: as in `rows`; sight: what the rows see, None for all.
        Returns: None if `rows` is needed: more than one token is new, or the mask of earlier tokens has changed. On a
            GPU the host does not read the mask; if it has changed, the sums become NaN.
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
        # Not in place: the sums may be shared.
        add = moments.on_cpu if readable(q) else moments.OPERATORS.add_token  # on the CPU without torch's dispatcher
        before = sums.keys, sums.values, sums.spread
        *found, mean_keys, rest = add(query, slopes, k, v, *before, visible, shown, self._seen)
        self._sums, self._seen, self.length = Moments(*found), shown, n
        return mean_keys[:, :, None], rest[:, :, None]

    def to_extend(self, batch: int, n: int) -> Moments | None:
        """Return the sums if they are on the CPU and cover all n tokens except the last; else None.

        A caller that adds the last token in place must call `extended`.
        """
        sums = self._sums
        if sums is None or self._seen is not None or self.length != n - 1 or len(sums.keys) != batch:
            return None
        return sums if sums.keys.device.type == "cpu" and all(x.is_contiguous() for x in sums) else None

    def extended(self, n: int) -> None:
        """Record that the sums now cover all n tokens."""
        assert self._sums is not None
        self._sums.tokens.numpy().fill(n)  # torch refuses to write inference-mode tensors outside of inference mode
        self.length = n

    def copied(self) -> RunningMoments:
        """Return a copy that shares no memory, as steps may add to the sums in place."""
        twin = copy.copy(self)
        with ordinary_tensors():
            twin._sums = None if self._sums is None else self._sums.map(torch.clone)
        return twin

    def drop(self, k: Tensor, v: Tensor, length: int) -> None:
        """Subtract the tokens from `length` on from the sums; k and v must still contain them."""
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
        """Continue from sums over the tokens marked in `seen` [B, T]."""
        self.length, self._sums, self._seen = seen.shape[1], sums, seen

    def store(self, sums: Moments, seen: Tensor) -> None:
        """Write the sums into tensors of the same shape, and the counted tokens into the first columns of `seen`."""
        if self._sums is not None:
            for room, found in zip(sums, self._sums, strict=True):
                room.copy_(found)
            seen[:, : self.length] = True if self._seen is None else self._seen

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change`, a function on the batch dimension, to the sums."""
        if self._sums is not None:
            self._sums = self._sums.map(change)
            self._seen = None if self._seen is None else change(self._seen)

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return 0 if self._sums is None else sum(x.nbytes for x in self._sums)

    def advance(self, k: Tensor, v: Tensor, seen: Tensor | None, length: int, device: torch.device) -> Moments:
        """Bring the sums up to token `length`; recompute them if they are of other tokens than `seen`."""
        if self.length > length or not self._same(seen, k.shape[0]):
            self.forget()
        if self._sums is None:
            self._sums = Moments.of(k, v, seen, 0, length, device)
        elif self.length < length:
            self._sums = self._sums.join(Moments.of(k, v, seen, self.length, length, device))
        self._note(seen, length)
        return self._sums

    def _note(self, seen: Tensor | None, length: int) -> None:
        """Record which tokens the sums cover."""
        self.length = length
        self._seen = None if seen is None else seen[:, :length]

    def _same(self, seen: Tensor | None, batch: int) -> bool:
        """Whether the tokens summed so far are those that are visible now."""
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
        tensors: those of `Moments`; the counted tokens, bool [B, N]; and the number of tokens including padding, int64
            [B], equal in all rows: on CUDA each row reads its own.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors: list[Tensor] = list(tensors)
        self.ready: bool = False
        """Whether the sums are known to cover all earlier tokens, so that a step need not check."""

    @classmethod
    def empty(cls, keys: Tensor, values: Tensor) -> StaticMoments:
        """Allocate sums of zero tokens for a cache of keys [B, Hkv, N, D] and values [B, Hkv, N, Dv]."""
        seen = keys.new_zeros(keys.shape[0], keys.shape[2], dtype=torch.bool)
        return cls(
            [*Moments.none(keys, values, keys.device), seen, keys.new_zeros(max(1, len(keys)), dtype=torch.int64)]
        )

    @torch.no_grad()
    def rows(
        self, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the means as `RunningMoments.rows` does."""
        running = self._running()
        found = running.rows(q, slopes, k, v, seen, first, last)
        self._store(running)
        return found

    @torch.no_grad()
    def learn(self, k: Tensor, v: Tensor, seen: Tensor | None) -> None:
        """Add all tokens of a prompt's k and v that are `seen` [B, N]."""
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
        """Like `RunningMoments.step`, in place; `length`: number of tokens in the cache, int64 []."""
        if not self.ready or sight is None or length is None:
            return None
        if readable(q) and not self._is_next(sight, int(length) - 1):
            return None
        given = q[:, :, 0], slopes, k, v, *self.tensors, sight.visible, sight.tokens, length
        add = moments.on_cpu_in_place if readable(q) else moments.OPERATORS.add_in_place
        mean_keys, rest = add(*given)
        return mean_keys[:, :, None], rest[:, :, None]

    def _is_next(self, sight: Seen, at: int) -> bool:
        """Whether the sums cover exactly the visible tokens before position `at`."""
        *_, counted, length = self.tensors
        return int(length[0]) == at and torch.equal(counted[:, :at], sight.tokens[:, :at])

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change`, a reordering of the batch rows, to the sums."""
        for x in self.tensors[:-1]:
            x.copy_(change(x))

    def reset(self) -> None:
        """Reset the sums to zero tokens."""
        self.tensors[-1].zero_()
        self.ready = False

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return sum(x.nbytes for x in self.tensors)


def _between(a: Moments, b: Moments) -> Tensor:
    """Return the spread between the means of a and b: spread(a + b) = spread(a) + spread(b) + this."""
    (keys_a, values_a), (keys_b, values_b) = a.means(), b.means()
    factor = (a.tokens * b.tokens / (a.tokens + b.tokens).clamp(min=1))[:, None, None]
    return (((keys_b - keys_a) * factor)[..., None] * (values_b - values_a)[:, :, None]).float()


def _count(x: Tensor, seen: Tensor | None, first: int, last: int) -> Tensor:
    """Return running counts of the tokens first..last-1 of [B, Hkv, N, X] without padding: int64 [B, last - first]."""
    if seen is None:
        return torch.arange(1, last - first + 1, device=x.device).expand(len(x), -1)
    return seen[:, first:last].cumsum(-1)


def _shown(x: Tensor, seen: Tensor | None, first: int, last: int, device: torch.device) -> Tensor:
    """Return tokens first..last-1 of [B, Hkv, N, X] on `device` as float64, with zeros for padding."""
    part = x[:, :, first:last].to(device).double()
    return part if seen is None else torch.where(seen[:, None, first:last, None], part, 0.0)


def _deviations(x: Tensor, mean: Tensor, seen: Tensor | None, first: int, last: int) -> Tensor:
    """Return tokens first..last-1 of [B, Hkv, N, X] minus a mean [B, Hkv, X], float32, with zeros for padding."""
    part = (x[:, :, first:last].to(mean.device).double() - mean[:, :, None]).float()
    return part if seen is None else torch.where(seen[:, None, first:last, None], part, 0.0)
