"""Sums over the tokens of a cache: their number, keys, values, and how values vary with keys (eq. 15 and 16)."""

from typing import NamedTuple

import torch
from torch import Tensor

FOLD = 16
"""Steps add so many tokens to the sums at once. Until then they read the keys and values of these tokens."""
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
    def none(cls, k: Tensor, v: Tensor, device: torch.device | None = None) -> "Moments":
        """Return sums of zero tokens, for keys [B, Hkv, N, D] and values [B, Hkv, N, Dv]."""
        (batch, heads, _, dim), dim_v = k.shape, v.shape[3]
        device = k.device if device is None else device
        keys, values = (torch.zeros(*x.shape[:2], x.shape[3], dtype=torch.float64, device=device) for x in (k, v))
        spread = torch.zeros(batch, heads, dim, dim_v, dtype=torch.float32, device=device)
        return cls(keys.new_zeros(batch), keys, values, spread)

    @classmethod
    def of(cls, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int, device: torch.device) -> "Moments":
        """Return the sums over tokens first..last-1 of k and v without padding, computed on `device`."""
        tokens = max(1, _CHUNK // (8 * max(k[:, :, :1].numel(), v[:, :, :1].numel()) + 1))
        found = cls.none(k, v, device)
        for start in range(first, last, tokens):
            end = min(start + tokens, last)
            keys, values = (shown_tokens(x, seen, start, end, device).sum(2) for x in (k, v))
            part = cls(count_shown(keys, seen, start, end)[:, -1].double(), keys, values, found.spread)
            keys, values = (deviations(x, mean, seen, start, end) for x, mean in zip((k, v), part.means(), strict=True))
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


class Rounded(NamedTuple):
    """The spread of `Moments` as steps read it, 8 bits per number. The sums themselves stay exact."""

    levels: Tensor
    """int8 [B, Hkv, D, Dv], from -127 to 127."""
    scales: Tensor
    """Value of a level in each row, float32 [B, Hkv, D]."""

    @classmethod
    def of(cls, spread: Tensor) -> "Rounded":
        """Round a spread [B, Hkv, D, Dv], to the nearest level, ties to even."""
        scales = spread.abs().amax(-1) / 127
        levels = (spread / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round().to(torch.int8)
        return cls(levels, scales)


def _between(a: Moments, b: Moments) -> Tensor:
    """Return the spread between the means of a and b: spread(a + b) = spread(a) + spread(b) + this."""
    (keys_a, values_a), (keys_b, values_b) = a.means(), b.means()
    factor = (a.tokens * b.tokens / (a.tokens + b.tokens).clamp(min=1))[:, None, None]
    return (((keys_b - keys_a) * factor)[..., None] * (values_b - values_a)[:, :, None]).float()


def count_shown(x: Tensor, seen: Tensor | None, first: int, last: int) -> Tensor:
    """Return running counts of the tokens first..last-1 of [B, Hkv, N, X] without padding: int64 [B, last - first]."""
    if seen is None:
        return torch.arange(1, last - first + 1, device=x.device).expand(len(x), -1)
    return seen[:, first:last].cumsum(-1)


def shown_tokens(x: Tensor, seen: Tensor | None, first: int, last: int, device: torch.device) -> Tensor:
    """Return tokens first..last-1 of [B, Hkv, N, X] on `device` as float64, with zeros for padding."""
    part = x[:, :, first:last].to(device).double()
    return part if seen is None else torch.where(seen[:, None, first:last, None], part, 0.0)


def deviations(x: Tensor, mean: Tensor, seen: Tensor | None, first: int, last: int) -> Tensor:
    """Return tokens first..last-1 of [B, Hkv, N, X] minus a mean [B, Hkv, X], float32, with zeros for padding."""
    part = (x[:, :, first:last].to(mean.device).double() - mean[:, :, None]).float()
    return part if seen is None else torch.where(seen[:, None, first:last, None], part, 0.0)


def means_of_rows(
    before: Moments, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the means of the tokens that rows first..last-1 see; before: the sums of earlier ones.

    Args, returns: as in `RunningMoments.rows`.
    """
    counts = before.tokens.long()[:, None] + count_shown(q, seen, first, last)
    visible = counts.clamp(min=1)[:, None, :, None]
    centres = [mean[:, :, None] for mean in before.means()]
    mean_k, mean_v = (
        (total[:, :, None] + shown_tokens(x, seen, first, last, q.device).cumsum(2)) / visible
        for total, x in ((before.keys, k), (before.values, v))
    )
    drift_k, drift_v = ((mean - centre).float() for mean, centre in zip((mean_k, mean_v), centres, strict=True))
    new_k, new_v = (
        deviations(x, c[:, :, 0], seen, first, last)[:, :, None] for x, c in zip((k, v), centres, strict=True)
    )
    grouped = (q.float() * slopes[:, None, None]).unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, R, D]
    products = grouped @ before.spread[:, :, None] + (grouped @ new_k.mT).tril() @ new_v
    tilt = products / visible[:, :, None] - (grouped * drift_k[:, :, None]).sum(-1, keepdim=True) * drift_v[:, :, None]
    return mean_k.float(), (mean_v.float()[:, :, None] + tilt).float().flatten(1, 2), counts
