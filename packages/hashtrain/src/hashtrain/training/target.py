"""The training target, what a perfect selector would select: exact attention, its top tokens, and pairs to compare."""

from typing import Literal, NamedTuple, cast, overload

import torch
from torch import Tensor

from hashtrain.config import RECENT, SINK, Heads
from hashtrain.device import to_device

_GROUP = 8
"""Tokens of a group of `largest`: 4 and 16 take more time at 4,096 tokens and 81 largest."""


@overload
def top_count(visible: int, fraction: float, min_tokens: int = 1, max_tokens: int | None = None) -> int: ...
@overload
def top_count(visible: Tensor, fraction: float, min_tokens: int = 1, max_tokens: int | None = None) -> Tensor: ...


def top_count(
    visible: int | Tensor, fraction: float, min_tokens: int = 1, max_tokens: int | None = None
) -> int | Tensor:
    """Return how many of `visible` tokens a row may select, never more than it sees.

    Source: docs/algorithm.md, eq. 7.
    """
    # Not as_tensor: it would use the default device, which may not be the tensor's.
    n = visible if isinstance(visible, Tensor) else torch.tensor(visible, dtype=torch.int64, device="cpu")
    # 1e-9 keeps floor(0.07 * 100) at 7: products of decimal fractions may fall just below whole numbers.
    count = (n.double() * fraction + 1e-9).floor().long().clamp(min=min_tokens, max=max_tokens).minimum(n.long())
    return count if isinstance(visible, Tensor) else int(count)


def always_read(positions: Tensor, t: int, sink: int = SINK, recent: int = RECENT) -> Tensor:
    """Return which of `t` tokens each row always reads, its first `sink` and last `recent` ones: bool [R, t].

    Args:
        positions: int64 [R]; row r sees tokens 0 ... positions[r].
    """
    tokens = always_read_tokens(positions, sink, recent)
    found = torch.zeros(len(positions), t + 1, dtype=torch.bool, device=positions.device)
    return found.scatter_(1, tokens.masked_fill(tokens < 0, t), True)[:, :t]


def always_read_tokens(positions: Tensor, sink: int = SINK, recent: int = RECENT) -> Tensor:
    """Return the tokens of `always_read` as numbers: int64 [R, sink + recent], -1 in unused slots."""
    last = positions[:, None]
    first = torch.arange(sink, device=positions.device).expand(len(positions), sink)
    ends = last - torch.arange(recent, device=positions.device)
    return torch.cat([first.masked_fill(first > last, -1), ends.masked_fill(ends < sink, -1)], -1)


def logits(q: Tensor, k: Tensor, positions: Tensor, scaling: float) -> Tensor:
    """Compute exact logits of some rows.

    Args:
        q: queries of those rows, [B, Hq, R, D]; k: keys, [B, Hkv, T, D]; both after RoPE.
        positions: the rows' positions in the sequence, int64 [R].
        scaling: the model's attention scaling, usually D^-0.5.
    Returns: float32 [B, Hkv, G, R, T], -inf at invisible tokens.
    """
    batch, hq, rows, _ = q.shape
    hkv, t = k.shape[1], k.shape[2]
    # In place where possible: allocating every intermediate costs more than the arithmetic. A group's rows share their
    # keys, so they are rows of one product: torch would copy the keys for each query head.
    found = (q.float().reshape(batch, hkv, -1, q.shape[-1]) @ k.float().transpose(-1, -2)).mul_(scaling)
    unseen = torch.arange(t, device=positions.device) > positions[:, None]
    return found.view(batch, hkv, hq // hkv, rows, t).masked_fill_(unseen, -torch.inf)


def attention(q: Tensor, k: Tensor, positions: Tensor, scaling: float, heads: Heads = "kv") -> Tensor:
    """Compute exact causal attention probabilities of some rows.

    Args:
        q, k, positions, scaling: see `logits`.
        heads: `kv` sums over the group (eq. 9), giving [B, Hkv, R, T]; `query` keeps [B, Hq, R, T].
    Returns: float32; invisible tokens get -1, below every visible one.
    """
    p = logits(q, k, positions, scaling).softmax(-1)
    unseen = torch.arange(p.shape[-1], device=positions.device) > positions[:, None]
    return (p.sum(2) if heads == "kv" else p.flatten(1, 2)).masked_fill_(unseen, -1.0)


class Pairs(NamedTuple):
    """Sampled comparisons: each `top` token should outscore each `rest` token where `valid`."""

    top: Tensor
    """int64 [B, H, R, A]: tokens of each row's target."""
    rest: Tensor
    """int64 [C]: tokens to compare with, shared by all rows and heads, as in the paper: their keys are hashed once."""
    valid: Tensor
    """bool [B, H, R, C]: whether the token is visible to the row and not in its target."""


def preferences(q: Tensor, k: Tensor, positions: Tensor, scaling: float, heads: Heads) -> Tensor:
    """Order the tokens of some rows by exact attention: arguments and sizes as for `attention`, for `sample_pairs`.

    Returns: probabilities for KV heads; for query heads logits, which have the same order and take less time.
    """
    if heads == "kv":
        return attention(q, k, positions, scaling)
    return logits(q, k, positions, scaling).flatten(1, 2)


def largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the values and indices of `x.topk(count)`, float [..., count], in half the time where a row is long.

    A group of tokens whose maximum is not among the `count` largest maxima holds none that is needed.
    """
    groups = x.shape[-1] // _GROUP
    if groups < 2 * count:
        return x.topk(count)
    end = groups * _GROUP
    maxima = cast(Tensor, x[..., :end].unflatten(-1, (_GROUP, groups))).amax(-2)
    found = maxima.topk(count, sorted=False).indices
    tokens = torch.cat([*((found + start) for start in range(0, end, groups)), _tail(found, end, x.shape[-1])], -1)
    values, at = x.gather(-1, tokens).topk(count)
    return values, tokens.gather(-1, at)


def _tail(like: Tensor, start: int, end: int) -> Tensor:
    """Return the tokens that are in no group, for each row of a tensor."""
    return torch.arange(start, end, device=like.device).expand(*like.shape[:-1], -1)


def sample_pairs(
    p: Tensor,
    positions: Tensor,
    fraction: float,
    max_top: int,
    max_rest: int,
    generator: torch.Generator,
    of: Literal["visible", "length"] = "visible",
    ends: tuple[int, int] = (SINK, RECENT),
    by_attention: bool = False,
) -> Pairs:
    """Draw tokens of each row's target, and tokens of the whole context, with replacement.

    Args:
        p: of `preferences` or `attention`, [B, H, R, T]; overwritten.
        positions: int64 [R], on the host like the generator, so that nothing waits for the device. Row r sees
            positions[r] + 1 tokens and reads `fraction` of them, including those always read; the target is the best of
            the others.
        max_top, max_rest: how many to draw: A per row, and C for all rows.
        of: what `fraction` is a share of: the row's visible tokens, or all T, as in the paper. A row that sees no more
            tokens than that has all of them in its target and no valid pair.
        ends: numbers of first and last tokens that are always read.
        by_attention: whether a target's tokens are drawn in proportion to their attention, not uniformly as all others;
            `p` then holds probabilities.
    """
    visible = positions + 1
    wanted = top_count(visible if of == "visible" else torch.full_like(visible, p.shape[-1]), fraction)
    counts = (wanted.minimum(visible) - visible.clamp(max=sum(ends))).clamp(min=1)
    size = *p.shape[:-1], max_top
    draws = torch.rand(size, generator=generator, dtype=torch.float32, device="cpu")
    rest = torch.randint(int(visible.max()), (max_rest,), generator=generator, device="cpu")
    at, last, draws, rest = (to_device(x, p.device) for x in (positions, counts - 1, draws, rest))
    p = p.masked_fill_(always_read(at, p.shape[-1], *ends), -torch.inf)
    values, tokens = largest(p, int(counts.max()))
    threshold = values.gather(-1, last[None, None, :, None].expand(*p.shape[:-1], 1))
    found = p.gather(-1, rest.expand(*p.shape[:-1], -1))
    valid = (found < threshold) & (found > -torch.inf) & (rest <= at[:, None])
    drawn = _by_weight(values, last, draws) if by_attention else (draws * (last + 1)[:, None]).long()
    return Pairs(tokens.gather(-1, drawn), rest, valid)


def _by_weight(weights: Tensor, last: Tensor, draws: Tensor) -> Tensor:
    """Draw ranks up to last [R] in proportion to weights [..., R, K], by draws in [0, 1) [..., R, A]."""
    counts = torch.arange(weights.shape[-1], device=weights.device) <= last[:, None]
    sums = torch.where(counts, weights.clamp(min=0), 0.0).cumsum(-1)
    found = torch.searchsorted(sums, draws * sums[..., -1:], right=True)
    return found.minimum(last[:, None])
