"""Sums over the tokens of a cache, from which the remainder is made (docs/algorithm.md, eq. 15 and 16).

The remainder adds the unselected tokens of a row back as one token. Its value is the mean of the visible values plus,
for each query head, their covariance with the keys times the query. Its weight is estimated from the mean of the
visible keys. `Sums` stores what these means need beside a cache. A decode step reads them, with the covariance rounded
to 8 bits, and the keys and values of the last tokens, which they do not cover yet; every `FOLD` tokens these are added.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from hashtrain.layers import REMAINDER_TERMS
from torch import Tensor

from sparse_decode.modes import ordinary_tensors

FOLD = 16
"""Steps add so many tokens to the sums at once. Until then they read the keys and values of these tokens."""
_CHUNK = 1 << 26  # bytes of float64 keys or values summed per chunk, at any batch size and context length


class Coefficients:
    """A layer's coefficients of the remainder, copied to a device when first asked for there.

    Args: fitted: `LayerHasher.remainder`, [Hq, 6].
    """

    def __init__(self, fitted: Tensor) -> None:
        if fitted.dim() != 2 or fitted.shape[1] != REMAINDER_TERMS:
            raise ValueError(
                f"a remainder must be [query heads, {REMAINDER_TERMS}], got {[*fitted.shape]}; fit it with this "
                "version of hashtrain, or attach with remainder=False"
            )
        self.fitted: Tensor = fitted.float().clone()
        self.placed: dict[tuple[torch.device, float], tuple[Tensor, Tensor]] = {}
        """What `on` has returned, by its arguments."""

    def on(self, device: torch.device, scaling: float) -> tuple[Tensor, Tensor]:
        """Return the coefficients on a device, float32 [Hq, 5], and the slopes [Hq] times `scaling`."""
        if (known := self.placed.get((device, scaling))) is None:
            with ordinary_tensors():  # they outlive torch modes of this call
                placed = self.fitted.to(device)
                known = placed[:, :-1].contiguous(), placed[:, -1] * scaling
            self.placed[device, scaling] = known
        return known


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
    def none(cls, k: Tensor, v: Tensor, device: torch.device) -> "Moments":
        """Return sums of zero tokens, for keys [B, Hkv, N, D] and values [B, Hkv, N, Dv]."""
        keys, values = (torch.zeros(*x.shape[:2], x.shape[3], dtype=torch.float64, device=device) for x in (k, v))
        spread = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=torch.float32, device=device)
        return cls(keys.new_zeros(len(k)), keys, values, spread)

    @classmethod
    def of(cls, k: Tensor, v: Tensor, starts: Tensor | None, first: int, last: int, device: torch.device) -> "Moments":
        """Return the sums over tokens first..last-1 of k and v, of each sequence from its start on, on `device`."""
        tokens = max(1, _CHUNK // (8 * max(k[:, :, :1].numel(), v[:, :, :1].numel()) + 1))
        found = cls.none(k, v, device)
        for begin in range(first, last, tokens):
            end = min(begin + tokens, last)
            keys, values = (_shown(x, starts, begin, end, device).sum(2) for x in (k, v))
            part = cls(_counts(keys, starts, begin, end)[:, -1].double(), keys, values, found.spread)
            keys, values = (_far(x, mean, starts, begin, end) for x, mean in zip((k, v), part.means(), strict=True))
            found = found.join(part._replace(spread=keys.mT @ values))
        return found

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the mean key and value, float64; zeros if there are no tokens."""
        divisor = self.tokens.clamp(min=1)[:, None, None]
        return self.keys / divisor, self.values / divisor

    def join(self, other: "Moments") -> "Moments":
        """Return the sums over the tokens of both."""
        whole = Moments(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))
        return whole._replace(spread=whole.spread + _between(self, other))

    def without(self, last: "Moments") -> "Moments":
        """Return the sums without the `last` tokens, which must be part of them."""
        rest = Moments(*(mine - theirs for mine, theirs in zip(self, last, strict=True)))
        return rest._replace(spread=rest.spread - _between(rest, last))


class Sums:
    """Sums over the first `length` tokens of each sequence of a batch, from its start on.

    A step on CUDA reads and updates the tensors in place, so that a captured or compiled step does. There, for a static
    cache, the device alone knows the length: `summed`.

    Attributes:
        keys, values, spread: as in `Moments`. levels, scales: the spread as steps read it, int8 [B, Hkv, D, Dv] from
            -127 to 127, and the value of a level in each row, float32 [B, Hkv, D]; the sums themselves stay exact.
        starts: first token of each sequence, int64 [B]; None: 0.
        summed: the number of tokens on the device, int64 [B, Hkv], equal everywhere: each block reads and writes its
            own; None: `length`, which is then known to the host.
    """

    def __init__(self) -> None:
        self.summed: Tensor | None = None
        self.forget()

    @classmethod
    def static(cls, k: Tensor, v: Tensor) -> "Sums":
        """Allocate sums of zero tokens for a static cache of keys [B, Hkv, N, D] and values [B, Hkv, N, Dv]."""
        made, zeros = cls(), k.new_zeros(max(1, len(k)), k.shape[1], dtype=torch.int64)
        made._put(Moments.none(k, v, k.device), zeros[: len(k), 0].clone(), 0)
        made.summed, made.ready = zeros, False
        return made

    def forget(self) -> None:
        """Discard the sums; the next call recomputes them."""
        self.length: int = 0
        """Tokens summed so far, padding included."""
        self.ready: bool = False
        """Whether a step on a device may use the sums without a look at them."""
        if self.summed is not None:
            self.summed.zero_()
            return
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.spread: Tensor | None = None
        self.levels: Tensor | None = None
        self.scales: Tensor | None = None
        self.starts: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that a step on a device reads and writes, in the order of the operator `add_token`."""
        found = [self.keys, self.values, self.spread, self.levels, self.scales]
        found += [] if self.summed is None else [self.starts, self.summed]
        return [x for x in found if x is not None]

    @classmethod
    def from_tensors(cls, tensors: list[Tensor]) -> "Sums":
        """Return the sums of a static cache, given their `tensors`, which are shared."""
        made = cls()
        made.keys, made.values, made.spread, made.levels, made.scales, made.starts, made.summed = tensors
        made.length, made.ready = int(made.summed[0, 0]), True
        return made

    def _put(self, sums: Moments, starts: Tensor | None, length: int) -> None:
        with ordinary_tensors():  # they outlive torch modes of this call
            scales = sums.spread.abs().amax(-1) / 127
            tiny = torch.finfo(torch.float32).tiny
            levels = (sums.spread / scales.clamp(min=tiny)[..., None]).round().to(torch.int8)
            new = (*sums[1:], levels, scales)
            old = self.keys, self.values, self.spread, self.levels, self.scales
            if self.summed is None or self.keys is None or self.keys.shape != sums.keys.shape:
                self.keys, self.values, self.spread, self.levels, self.scales = (x.clone() for x in new)
                self.starts = None if starts is None else starts.clone(memory_format=torch.contiguous_format)
            else:  # a compiled or captured step knows these tensors
                for room, found in zip(old, new, strict=True):
                    room.copy_(found)  # pyright: ignore[reportOptionalMemberAccess]
                self.starts.copy_(0 if starts is None else starts)  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
        if self.summed is not None:
            self.summed.fill_(length)
        self.length, self.ready = length, True

    def restore(self, keys: Tensor, values: Tensor, spread: Tensor, starts: Tensor | None, length: int) -> None:
        """Take sums over `length` tokens, as the attributes of these names hold them."""
        self._put(Moments(keys.new_zeros(len(keys)), keys, values, spread), starts, length)
        self.ready = False

    def _moments(self) -> Moments:
        assert self.keys is not None
        assert self.values is not None
        assert self.spread is not None
        length = self.keys.new_full((len(self.keys),), self.length)
        tokens = length if self.starts is None else (length - self.starts).clamp(min=0)
        return Moments(tokens, self.keys, self.values, self.spread)

    @torch.no_grad()
    def advance(self, k: Tensor, v: Tensor, starts: Tensor | None, length: int, device: torch.device) -> Moments:
        """Bring the sums up to token `length`; recompute them if they are of others than the tokens from starts on.

        Args: k [B, Hkv, N, D], v [B, Hkv, N, Dv]: all keys and values; starts: int64 [B], None: 0.
        """
        if self.summed is not None and self.keys is not None:  # a compiled step may have added tokens
            self.length = int(self.summed[0, 0])
        if self.length > length or not self._same(starts, len(k), device):
            self.forget()
        if not self.length:
            self._put(Moments.of(k, v, starts, 0, length, device), starts, length)
        elif self.length < length:
            self._put(self._moments().join(Moments.of(k, v, starts, self.length, length, device)), starts, length)
        self.ready = True
        return self._moments()

    def is_for(self, batch: int, device: torch.device) -> bool:
        """Whether the sums are of a batch of this size, there."""
        return self.keys is not None and len(self.keys) == batch and self.keys.device == device

    def _same(self, starts: Tensor | None, batch: int, device: torch.device) -> bool:
        """Whether the sums are of a batch of this size, there, with these starts."""
        if not self.is_for(batch, device):
            return False
        if starts is None or self.starts is None:
            return all(x is None or not x.any() for x in (starts, self.starts))
        return torch.equal(self.starts, starts)

    def covers(self, n: int, batch: int, starts: Tensor | None, device: torch.device) -> bool:
        """Whether the sums are of all of n tokens but the last few, of sequences with these starts."""
        return self.length < n <= self.length + FOLD and self._same(starts, batch, device)

    @torch.no_grad()
    def drop(self, k: Tensor, v: Tensor, length: int) -> None:
        """Subtract the tokens from `length` on from the sums; k and v must still contain them."""
        if length >= self.length:
            return
        if not length:
            return self.forget()
        assert self.keys is not None
        device = self.keys.device
        rest = self._moments().without(Moments.of(k, v, self.starts, length, self.length, device))
        bad = ~rest.spread.isfinite().flatten(1).all(1)
        if bad.any():  # numbers that are not finite cannot be subtracted
            anew = Moments.of(k, v, self.starts, 0, length, device)
            rest = Moments(*(x.where(~bad.view(-1, *[1] * (x.ndim - 1)), y) for x, y in zip(rest, anew, strict=True)))
        self._put(rest, self.starts, length)

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change`, a function on the batch dimension, to the sums; in place for those of a static cache."""
        for name in ("keys", "values", "spread", "levels", "scales", "starts"):
            held: Tensor | None = getattr(self, name)
            if held is not None and self.summed is not None:
                held.copy_(change(held))
            elif held is not None:
                setattr(self, name, change(held))


@torch.no_grad()
def means_of_rows(
    before: Moments, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """Return the means of the tokens that rows first..last-1 see (eq. 16): their own and all earlier ones.

    Args:
        before: the sums of the tokens before `first`. q: queries of the rows, [B, Hq, R, D]; slopes: per query head,
            times the factor on the logits, [Hq]. k [B, Hkv, N, D], v [B, Hkv, N, Dv], starts: as in `Sums.advance`.
    Returns: float32 mean keys [B, Hkv, R, D] and values [B, Hq, R, Dv].
    """
    counts = before.tokens.long()[:, None] + _counts(q, starts, first, last)
    divisor = counts.clamp(min=1)[:, None, :, None]
    centres = [mean[:, :, None] for mean in before.means()]
    mean_k, mean_v = (
        (total[:, :, None] + _shown(x, starts, first, last, q.device).cumsum(2)) / divisor
        for total, x in ((before.keys, k), (before.values, v))
    )
    drift_k, drift_v = ((mean - centre).float() for mean, centre in zip((mean_k, mean_v), centres, strict=True))
    new_k, new_v = (_far(x, c[:, :, 0], starts, first, last)[:, :, None] for x, c in zip((k, v), centres, strict=True))
    grouped = (q.float() * slopes[:, None, None]).unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, R, D]
    products = grouped @ before.spread[:, :, None] + (grouped @ new_k.mT).tril() @ new_v
    tilt = products / divisor[:, :, None] - (grouped * drift_k[:, :, None]).sum(-1, keepdim=True) * drift_v[:, :, None]
    return mean_k.float(), (mean_v.float()[:, :, None] + tilt).float().flatten(1, 2)


def _between(a: Moments, b: Moments) -> Tensor:
    """Return the spread between the means of a and b: spread(a + b) = spread(a) + spread(b) + this."""
    (keys_a, values_a), (keys_b, values_b) = a.means(), b.means()
    factor = (a.tokens * b.tokens / (a.tokens + b.tokens).clamp(min=1))[:, None, None]
    return (((keys_b - keys_a) * factor)[..., None] * (values_b - values_a)[:, :, None]).float()


def _hidden(starts: Tensor, first: int, last: int) -> Tensor:
    """Return which of the tokens first..last-1 lie before their sequence's start: bool [B, last - first]."""
    return torch.arange(first, last, device=starts.device) < starts[:, None]


def _counts(like: Tensor, starts: Tensor | None, first: int, last: int) -> Tensor:
    """Return running counts of the tokens first..last-1 from starts on: int64 [B, last - first]."""
    if starts is None:
        return torch.arange(1, last - first + 1, device=like.device).expand(len(like), -1)
    return (~_hidden(starts, first, last)).cumsum(-1)


def _shown(x: Tensor, starts: Tensor | None, first: int, last: int, device: torch.device) -> Tensor:
    """Return tokens first..last-1 of [B, Hkv, N, X] on `device` as float64, with zeros before starts."""
    part = x[:, :, first:last].to(device).double()
    return part if starts is None else part.masked_fill(_hidden(starts, first, last)[:, None, :, None], 0.0)


def _far(x: Tensor, mean: Tensor, starts: Tensor | None, first: int, last: int) -> Tensor:
    """Return tokens first..last-1 of [B, Hkv, N, X] minus a mean [B, Hkv, X], float32, with zeros before starts."""
    part = (x[:, :, first:last].to(mean.device).double() - mean[:, :, None]).float()
    return part if starts is None else part.masked_fill(_hidden(starts, first, last)[:, None, :, None], 0.0)
