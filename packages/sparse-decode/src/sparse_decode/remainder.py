"""What sparse attention leaves out, added back as one token (docs/algorithm.md, eq. 15 and 16).

The token's value is the mean of the visible values plus, for each query head, their covariance with the keys times the
query; its weight is estimated with the help of the mean of the visible keys. The sums that these are made of are kept
beside the cache: a decode step adds its own token to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from hashtrain.remainder import Evidence, add_remainder, log_weight
from torch import Tensor

from sparse_decode import moment_kernels, moments
from sparse_decode.compiled import run

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
    def none(cls, k: Tensor, v: Tensor) -> Moments:
        """Return those of no token, for keys [B, Hkv, N, D] and values [B, Hkv, N, Dv]."""
        (batch, heads, _, dim), dim_v = k.shape, v.shape[3]
        keys, values = (x.new_zeros(*x.shape[:2], x.shape[3], dtype=torch.float64) for x in (k, v))
        spread = k.new_zeros(batch, heads, dim, dim_v, dtype=torch.float32)
        return cls(keys.new_zeros(batch), keys, values, spread)

    @classmethod
    def of(cls, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int) -> Moments:
        """Return those of tokens first..last-1 of k and v, but for padding."""
        tokens = max(1, _CHUNK // (8 * max(k[:, :, :1].numel(), v[:, :, :1].numel()) + 1))
        found = cls.none(k, v)
        for start in range(first, last, tokens):
            end = min(start + tokens, last)
            keys, values = (_shown(x, seen, start, end).sum(2) for x in (k, v))
            part = cls(_count(k, seen, start, end)[:, -1].double(), keys, values, found.spread)
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
        self._forget()

    def _forget(self) -> None:
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
        before = self._advance(k, v, seen, first)
        counts = before.tokens.long()[:, None] + _count(k, seen, first, last)
        visible = counts.clamp(min=1)[:, None, :, None]
        centres = [mean[:, :, None] for mean in before.means()]
        mean_k, mean_v = (
            (total[:, :, None] + _shown(x, seen, first, last).cumsum(2)) / visible
            for total, x in ((before.keys, k), (before.values, v))
        )
        drift_k, drift_v = ((mean - centre).float() for mean, centre in zip((mean_k, mean_v), centres, strict=True))
        new_k, new_v = (
            _deviations(x, c[:, :, 0], seen, first, last)[:, :, None] for x, c in zip((k, v), centres, strict=True)
        )
        grouped = (q.float() * slopes[:, None, None]).to(k.device).unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, R, D]
        products = grouped @ before.spread[:, :, None] + (grouped @ new_k.mT).tril() @ new_v
        tilt = (
            products / visible[:, :, None] - (grouped * drift_k[:, :, None]).sum(-1, keepdim=True) * drift_v[:, :, None]
        )
        self._sums = before.join(Moments.of(k, v, seen, first, last))
        self._note(seen, last)
        return mean_k.float(), (mean_v.float()[:, :, None] + tilt).float().flatten(1, 2), counts

    @torch.no_grad()
    def step(self, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return what `rows` returns for the last row, if its token alone is new, without padding.

        In one kernel. Args: as those of `rows`. Returns: None if there is more to do.
        """
        n, sums = k.shape[2], self._sums
        alike = sums is not None and len(sums.keys) == len(k) and sums.keys.device == k.device
        if sums is None or not alike or self.length != n - 1 or self._seen is not None:
            return None
        if k.device.type != "cpu":
            if q.shape[1] > moments.MAX_GROUP * k.shape[1]:
                return None
            *found, mean_keys, rest = moments.OPERATOR(q[:, :, 0], slopes, k[:, :, -1], v[:, :, -1], *sums[1:], n)
            self._sums, self.length = Moments(torch.full_like(sums.tokens, n), *found), n
            return mean_keys[:, :, None], rest[:, :, None]
        # Not in place: whoever was given the sums may keep them.
        self._sums, self.length = Moments(sums.tokens + 1, *map(torch.empty_like, sums[1:])), n
        mean_keys = torch.empty(k.shape[0], k.shape[1], 1, k.shape[3])
        rest = torch.empty(q.shape[0], q.shape[1], 1, v.shape[3])
        run(
            moment_kernels.tasks,
            k.shape[0] * k.shape[1],
            sums.spread.numel() * (1 + q.shape[1] // k.shape[1]),
            n,
            *(x.detach()[:, :, -1].float().contiguous().numpy() for x in (k, v)),
            *(x.numpy() for x in sums[1:]),
            q.detach()[:, :, -1].float().contiguous().numpy(),
            slopes.numpy(),
            *(x.numpy() for x in self._sums[1:]),
            mean_keys[:, :, 0].numpy(),
            rest[:, :, 0].numpy(),
        )
        return mean_keys, rest

    def drop(self, k: Tensor, v: Tensor, length: int) -> None:
        """Take the tokens from `length` on out of the sums; k and v still hold them."""
        if length >= self.length:
            return
        if not length:
            return self._forget()
        assert self._sums is not None
        self._sums = self._sums.without(Moments.of(k, v, self._seen, length, self.length))
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

    def _advance(self, k: Tensor, v: Tensor, seen: Tensor | None, length: int) -> Moments:
        """Sum the tokens up to `length`, or anew if these are not the tokens that were summed."""
        if self.length > length or not self._same(seen, k.shape[0]):
            self._forget()
        if self._sums is None:
            self._sums = Moments.of(k, v, seen, 0, length)
        elif self.length < length:
            self._sums = self._sums.join(Moments.of(k, v, seen, self.length, length))
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
            included, int64 [].
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors: list[Tensor] = list(tensors)

    @classmethod
    def empty(cls, keys: Tensor, values: Tensor) -> StaticMoments:
        """Make the sums for a cache of keys [B, Hkv, N, D] and values [B, Hkv, N, Dv], of no token yet."""
        seen = keys.new_zeros(keys.shape[0], keys.shape[2], dtype=torch.bool)
        return cls([*Moments.none(keys, values), seen, keys.new_zeros((), dtype=torch.int64)])

    @torch.no_grad()
    def rows(
        self, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `RunningMoments.rows` does."""
        running = RunningMoments()
        *sums, counted, length = self.tensors
        if int(length):
            running.load(Moments(*sums), counted[:, : int(length)])
        found = running.rows(q, slopes, k, v, seen, first, last)
        running.store(Moments(*sums), counted)
        length.fill_(running.length)
        return found

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums by a change of the order of their rows."""
        for x in self.tensors[:-1]:
            x.copy_(change(x))

    def reset(self) -> None:
        """Forget all tokens."""
        self.tensors[-1].zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return sum(x.nbytes for x in self.tensors)


def with_remainder(
    out: Tensor,
    facts: Tensor,
    q: Tensor,
    mean_keys: Tensor,
    values: Tensor,
    coefficients: Tensor,
    visible: Tensor,
    selected: Tensor,
    scaling: float,
) -> Tensor:
    """Add to attention over a selection what the selection leaves out.

    Args:
        out: [B, R, Hq, Dv]; facts: float32 [2, B, R, Hq], both as `attend` returns them; q: [B, Hq, R, D].
        mean_keys: of the visible tokens, [B, Hkv, R, D]; values: those of eq. 16, [B, Hq, R, Dv].
        coefficients: the first five of `LayerHasher.remainder`, [Hq, 5].
        visible: tokens each row sees, [B, R]; selected: tokens each query head selected, [B, R, Hq].
        scaling: the model's factor on the logits.
    Returns: [B, R, Hq, Dv] in out's type; rows without a selected token stay as they are.
    """
    grouped = q.float().unflatten(1, (mean_keys.shape[1], -1))
    mean_key = (grouped * mean_keys.to(q.device)[:, :, None]).sum(-1).flatten(1, 2).transpose(1, 2) * scaling
    mean, lse = facts[0], facts[1]
    evidence = Evidence(mean, lse, mean_key, visible[..., None], selected)
    weight = log_weight(coefficients.to(q.device), evidence)
    whole = add_remainder(out, lse, values.to(q.device).transpose(1, 2), weight)
    return torch.where((selected > 0)[..., None], whole, out.float()).to(out.dtype)


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


def _shown(x: Tensor, seen: Tensor | None, first: int, last: int) -> Tensor:
    """Return tokens first..last-1 of [B, Hkv, N, X] as float64, zeros where they are padding."""
    part = x[:, :, first:last].double()
    return part if seen is None else torch.where(seen[:, None, first:last, None], part, 0.0)


def _deviations(x: Tensor, mean: Tensor, seen: Tensor | None, first: int, last: int) -> Tensor:
    """Return tokens first..last-1 of [B, Hkv, N, X] less a mean [B, Hkv, X], float32, zeros where they are padding."""
    part = (x[:, :, first:last].double() - mean[:, :, None]).float()
    return part if seen is None else torch.where(seen[:, None, first:last, None], part, 0.0)
