"""What sparse attention leaves out, added back as one token (docs/algorithm.md, eq. 15 and 16).

The token's value is the mean of the visible values, its weight is estimated with the help of the mean of the visible
keys. Both means are kept as running sums beside the cache: a decode step adds its own token to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hashtrain.remainder import Evidence, add_remainder, log_weight
from torch import Tensor

_CHUNK = 1 << 26  # bytes of float64 keys or values that are summed at once, whatever the batch and the context


class RunningMeans:
    """Sums of the first keys and values of each sequence of a batch; tokens that nobody sees, its padding, are left
    out.

    It is told the same keys and values again at each call and reads those that are new. Sums are float64.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.length: int = 0
        """Tokens summed so far, padding included."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._seen: Tensor | None = None

    def rows(self, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the means that the rows of tokens first..last-1 see, each its own token and those before it.

        Args:
            k, v: all keys [B, Hkv, N, D] and values [B, Hkv, N, Dv]; seen: bool [B, N], False for padding, or None.
        Returns: float32 mean keys [B, Hkv, R, D] and values [B, Hkv, R, Dv], and how many tokens [B, R].
        """
        self._advance(k, v, seen, first)
        if seen is None:
            counts = torch.arange(first + 1, last + 1, device=k.device).expand(k.shape[0], -1)
        else:
            counts = seen[:, :first].sum(-1, keepdim=True) + seen[:, first:last].cumsum(-1)
        sums = []
        for before, x in ((self._keys, k), (self._values, v)):
            rows = _shown(x, seen, first, last)
            rows = rows if last == first + 1 else rows.cumsum(2)
            sums.append(rows if before is None else rows + before[:, :, None])
        self._keys, self._values = (x[:, :, -1].clone() for x in sums)
        self._note(seen, last)
        divisor = counts.clamp(min=1)[:, None, :, None]
        return (sums[0] / divisor).float(), (sums[1] / divisor).float(), counts

    def step(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the means of all tokens, [B, Hkv, 1, D] and [B, Hkv, 1, Dv], if only the last one is new.

        What `rows` returns for the last row without padding, by fewer operations; None if there is more to do.
        """
        n, keys, values = k.shape[2], self._keys, self._values
        if self.length != n - 1 or self._seen is not None or keys is None or values is None or len(keys) != len(k):
            return None
        # Not in place: whoever was given the sums may keep them.
        self._keys, self._values, self.length = keys + k[:, :, -1], values + v[:, :, -1], n
        return (self._keys / n).float()[:, :, None], (self._values / n).float()[:, :, None]

    def drop(self, k: Tensor, v: Tensor, length: int) -> None:
        """Take the tokens from `length` on out of the sums; k and v still hold them."""
        if length >= self.length:
            return
        if not length:
            return self._forget()
        assert self._keys is not None
        assert self._values is not None
        self._keys = self._keys - _sum(k, self._seen, length, self.length)
        self._values = self._values - _sum(v, self._seen, length, self.length)
        self._seen = None if self._seen is None else self._seen[:, :length]
        self.length = length

    def load(self, keys: Tensor, values: Tensor, seen: Tensor) -> None:
        """Go on from sums [B, Hkv, D] and [B, Hkv, Dv] over the tokens that `seen` [B, T] names."""
        self.length, self._keys, self._values, self._seen = seen.shape[1], keys, values, seen

    def store(self, keys: Tensor, values: Tensor, seen: Tensor) -> None:
        """Write the sums into tensors of their size, and into the first columns of `seen` which tokens they count."""
        if self._keys is not None and self._values is not None:
            keys.copy_(self._keys)
            values.copy_(self._values)
            seen[:, : self.length] = True if self._seen is None else self._seen

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums by a change of their batch dimension."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = change(self._keys), change(self._values)
            self._seen = None if self._seen is None else change(self._seen)

    def _advance(self, k: Tensor, v: Tensor, seen: Tensor | None, length: int) -> None:
        """Sum the tokens up to `length`, or anew if these are not the tokens that were summed."""
        if self.length > length or not self._same(seen, k.shape[0]):
            self._forget()
        if self.length < length:
            keys, values = (_sum(x, seen, self.length, length) for x in (k, v))
            self._keys = keys if self._keys is None else self._keys + keys
            self._values = values if self._values is None else self._values + values
        self._note(seen, length)

    def _note(self, seen: Tensor | None, length: int) -> None:
        """Remember of which tokens the sums now are."""
        self.length = length
        self._seen = None if seen is None else seen[:, :length]

    def _same(self, seen: Tensor | None, batch: int) -> bool:
        """Say whether the tokens summed so far are those that are visible now."""
        if self._keys is None:
            return True
        if self._keys.shape[0] != batch:
            return False
        before, now = self._seen, None if seen is None else seen[:, : self.length]
        if before is None or now is None:  # without a mask all are visible
            return all(x is None or bool(x.all()) for x in (before, now))
        return torch.equal(before, now)


class StaticMeans:
    """The running sums of a static cache: buffers of fixed size, so that a compiled step updates them in place.

    Attributes:
        tensors: sums of keys, float64 [B, Hkv, D], and of values, float64 [B, Hkv, Dv]; which tokens they count, bool
            [B, N]; and of how many tokens they are, padding included, int64 [].
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors: list[Tensor] = list(tensors)

    @classmethod
    def empty(cls, keys: Tensor, values: Tensor) -> StaticMeans:
        """Make the sums for a cache of keys [B, Hkv, N, D] and values [B, Hkv, N, Dv], of no token yet."""
        sums = [x.new_zeros(*x.shape[:2], x.shape[3], dtype=torch.float64) for x in (keys, values)]
        seen = keys.new_zeros(keys.shape[0], keys.shape[2], dtype=torch.bool)
        return cls([*sums, seen, keys.new_zeros((), dtype=torch.int64)])

    def rows(self, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `RunningMeans.rows` does."""
        means = RunningMeans()
        key_sums, value_sums, counted, length = self.tensors
        if int(length):
            means.load(key_sums, value_sums, counted[:, : int(length)])
        found = means.rows(k, v, seen, first, last)
        means.store(key_sums, value_sums, counted)
        length.fill_(means.length)
        return found

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums by a change of the order of their rows."""
        for x in self.tensors[:3]:
            x.copy_(change(x))

    def reset(self) -> None:
        """Forget all tokens."""
        self.tensors[3].zero_()


def with_remainder(
    out: Tensor,
    facts: Tensor,
    q: Tensor,
    means: tuple[Tensor, Tensor],
    coefficients: Tensor,
    visible: Tensor,
    selected: Tensor,
    scaling: float,
) -> Tensor:
    """Add to attention over a selection what the selection leaves out.

    Args:
        out: [B, R, Hq, Dv]; facts: float32 [2, B, R, Hq], both as `attend` returns them; q: [B, Hq, R, D].
        means: mean visible keys [B, Hkv, R, D] and values [B, Hkv, R, Dv].
        coefficients: `LayerHasher.remainder`, [Hq, 5].
        visible: tokens each row sees, [B, R]; selected: tokens each query head selected, [B, R, Hq].
        scaling: the model's factor on the logits.
    Returns: [B, R, Hq, Dv] in out's type; rows without a selected token stay as they are.
    """
    keys, values = (x.to(q.device)[:, :, None] for x in means)  # [B, Hkv, 1, R, D]: the group shares them
    grouped = q.float().unflatten(1, (keys.shape[1], -1))
    mean_key = (grouped * keys).sum(-1).flatten(1, 2).transpose(1, 2) * scaling  # [B, R, Hq]
    values = values.expand(-1, -1, grouped.shape[2], -1, -1).flatten(1, 2)
    mean, lse = facts[0], facts[1]
    evidence = Evidence(mean, lse, mean_key, visible[..., None], selected)
    weight = log_weight(coefficients.to(q.device), evidence)
    whole = add_remainder(out, lse, values.transpose(1, 2), weight)
    return torch.where((selected > 0)[..., None], whole, out.float()).to(out.dtype)


def _sum(x: Tensor, seen: Tensor | None, first: int, last: int) -> Tensor:
    """Sum tokens first..last-1 of [B, Hkv, N, X] that are no padding: float64 [B, Hkv, X]."""
    tokens = max(1, _CHUNK // (8 * x[:, :, :1].numel() + 1))
    total = x.new_zeros(*x.shape[:2], x.shape[3], dtype=torch.float64)
    for start in range(first, last, tokens):
        total += _shown(x, seen, start, min(start + tokens, last)).sum(2)
    return total


def _shown(x: Tensor, seen: Tensor | None, first: int, last: int) -> Tensor:
    """Return tokens first..last-1 of [B, Hkv, N, X] as float64, zeros where they are padding."""
    part = x[:, :, first:last].double()
    return part if seen is None else torch.where(seen[:, None, first:last, None], part, 0.0)
