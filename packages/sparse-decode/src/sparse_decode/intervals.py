"""What each row sees: one interval [start, end) of the tokens of its sequence.

Hugging Face builds masks of shape [B, 1, Q, N]. While attached, our mask functions build intervals instead, int64
[B, 1, Q, 2], once in a forward pass and without a tensor of size Q x N: of causal masks and of sliding windows, padded
on the left or not. Masks that are no intervals (packed sequences, prefixes that see each other, holes) stay as they
are, for dense calls.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import (
    causal_mask_function,
    eager_mask,
    flash_attention_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from sparse_decode.budget import LayerBudget
from sparse_decode.modes import in_graph, ordinary_tensors, readable

_BIASES = "the mask must hide or show tokens, got one with biases; sparse attention does not support biases"
_HOLES = (
    "each row of a mask must see consecutive tokens for sparse attention, got one with holes; pad on the left only, or "
    "call detach()"
)


def _mask(theirs: Callable[..., Tensor | None], **how: Any) -> Tensor | None:
    """Return intervals, int64 [B, 1, Q, 2]; None if all rows see all tokens up to their own; else the other mask."""
    by_flash = theirs is flash_attention_mask
    padding, device, rows = how.get("attention_mask"), how.get("device", "cpu"), how["q_length"]
    offset, n, first = how.get("q_offset", 0), how["kv_length"], how.get("kv_offset", 0)
    counted = isinstance(offset, int) and isinstance(first, int)
    other = theirs if by_flash else partial(_told, theirs, counted and offset - first + rows == n)
    shown = how.get("mask_function", causal_mask_function)
    window = None if shown is causal_mask_function else _window(shown)
    if window is None and (shown is not causal_mask_function or first):
        return other(**how)
    if how.get("allow_is_causal_skip") is False and (rows > 1 or (isinstance(offset, int) and window is None)):
        return other(**how)  # the model reads the mask itself; otherwise this is a step of a static cache
    if window is not None and by_flash and not counted:
        raise ValueError(
            "flash attention with sliding windows needs a dynamic cache here, got a static one; load the model with "
            'attn_implementation="sdpa"'
        )
    if window is not None and (by_flash or not counted):
        return other(**how)  # flash attention gets the window itself
    start, ends = None, torch.arange(1, rows + 1, device=device) + (offset - first)
    if padding is not None:
        padding = padding[:, first : first + n].bool()
        slots = torch.arange(padding.shape[1], device=device)
        start = padding.to(torch.uint8).argmax(1).masked_fill(~padding.any(1), n)
        wanted = (slots >= start[:, None]) & (slots < ends[-1])
        if readable(padding) or (rows > 1 and not torch.compiler.is_compiling()):
            if not torch.equal(padding & (slots < ends[-1]), wanted):
                return other(**how)
            if not bool(start.any()):
                start = None
        elif not torch.compiler.is_compiling():
            torch._assert_async((padding & (slots < ends[-1]) == wanted).all(), _HOLES)  # pyright: ignore[reportPrivateImportUsage]
    slides = window if window is not None and offset - first + rows > window else None
    if start is None and isinstance(offset, int) and offset - first + rows == n and slides is None:
        return None
    ends = ends.expand(how["batch_size"], -1)
    starts = torch.zeros_like(ends) if start is None else start[:, None].minimum(ends)
    if slides is not None:
        starts = starts.maximum(ends - slides)
    return torch.stack([starts.expand_as(ends), ends], -1)[:, None]


def _told(theirs: Callable[..., Tensor | None], last: bool, **how: Any) -> Tensor | None:
    """Return the mask of sdpa or eager attention; None only where that means what `_mask`'s does.

    Args: last: whether the rows are the last ones of the tokens.
    """
    skip = last and how.get("allow_is_causal_skip", True)
    return theirs(**{**how, "allow_is_causal_skip": skip, "allow_is_bidirectional_skip": False})


mask_of_sdpa, mask_of_eager, mask_of_flash = (partial(_mask, m) for m in (sdpa_mask, eager_mask, flash_attention_mask))
"""Build intervals in place of transformers' mask functions, whose arguments they take by name."""


_SLIDING = sliding_window_causal_mask_function(1)


def _window(shown: Any) -> int | None:
    """Return the tokens that a row of a sliding window sees, its own included; None for any other mask function."""
    if getattr(shown, "__code__", None) is not _SLIDING.__code__:  # both are made by `and_masks`
        return None
    kind: Any = _SLIDING
    parts, known = shown.__closure__[0].cell_contents, kind.__closure__[0].cell_contents
    if len(parts) != len(known) or parts[1] is not causal_mask_function:
        return None
    return parts[0].__closure__[0].cell_contents if parts[0].__code__ is known[0].__code__ else None


def is_interval(mask: Tensor | None) -> bool:
    """Whether a mask is one of intervals, [B, 1, Q, 2]."""
    return mask is not None and mask.dtype == torch.int64


def intervals_of(mask: Tensor | None, rows: int, n: int) -> Tensor | None:
    """Return the interval of each row, int64 [B or 1, Q, 2]; None if the last row sees all, each before it one less.

    Args: mask: intervals, or another mask [B or 1, 1, Q, N]: bool, or 0 for visible and the dtype's most negative
        number for hidden tokens.
    Raises: ValueError if a mask differs by head, has biases, or shows a row tokens that are not consecutive; on a
        device, where the host does not look, an error of the device.
    """
    if mask is None:
        return None
    if is_interval(mask):
        found = mask[:, 0]
        if readable(found) and found.numel() and int(found[..., 1].max()) > n:
            raise _too_narrow(mask, rows, n)
        return found
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ValueError(f"the mask must be shared by all heads, shape [B, 1, Q, N], got {tuple(mask.shape)}")
    require_width(mask, rows, n)
    seen = mask[:, 0].expand(-1, rows, n)
    if seen.dtype != torch.bool:
        shown = seen == 0
        _require((shown | (seen <= torch.finfo(seen.dtype).min / 2)).all(), _BIASES)
        seen = shown
    start = seen.to(torch.uint8).argmax(-1)
    end, slots = start + seen.sum(-1), torch.arange(n, device=seen.device)
    _require((seen == ((slots >= start[..., None]) & (slots < end[..., None]))).all(), _HOLES)
    return torch.stack([start, end], -1)


def require_width(mask: Tensor, rows: int, n: int) -> None:
    """Raise ValueError unless torch would broadcast a mask [.., Q, N] to `rows` rows and n tokens."""
    if any(got not in (1, size) for got, size in zip(mask.shape[-2:], (rows, n), strict=True)):
        raise _too_narrow(mask, rows, n)


def _too_narrow(mask: Tensor, rows: int, n: int) -> ValueError:
    return ValueError(
        f"the mask must be for {rows} rows and {n} keys, got shape {tuple(mask.shape)}; if the cache's layers differ "
        "in length, pass no mask"
    )


def _require(right: Tensor, text: str) -> None:
    if not readable(right):
        torch._assert_async(right, text)  # pyright: ignore[reportPrivateImportUsage]
    elif not right:
        raise ValueError(text)


def visible(interval: Tensor, n: int) -> Tensor:
    """Return which of n tokens rows see, bool [B, 1, Q, N], given their intervals [B, Q, 2]."""
    slots = torch.arange(n, device=interval.device)
    return ((slots >= interval[..., :1]) & (slots < interval[..., 1:]))[:, None]


def causal(batch: int, rows: int, n: int, device: torch.device) -> Tensor:
    """Return the intervals of the last `rows` of n tokens, each of which sees all up to its own: int64 [B, Q, 2]."""
    ends = torch.arange(n - rows + 1, n + 1, device=device)
    return torch.stack([torch.zeros_like(ends), ends], -1).expand(batch, -1, -1)


class Seen(NamedTuple):
    """What rows see and read, on a device: found once in a step for all layers of a budget."""

    interval: Tensor
    """int64 [B, Q, 2], contiguous."""
    starts: Tensor
    """First and last (exclusive) of the visible tokens, int64 [B, 1, Q]."""
    ends: Tensor
    counts: Tensor
    """Tokens to select, int64 [B, 1, Q], or [B, H, Q] by head."""
    always: Tensor
    """Indices of sink and recent tokens, int64 [B, Q, E], -1 in unused slots."""
    visible: Tensor
    """Number of visible tokens, int64 [B, Q]."""


def seen_on_device(interval: Tensor, budget: LayerBudget) -> tuple[Seen, Tensor]:
    """Return what rows with intervals [B, Q, 2] see and read; and tokens read and seen, summed over rows, int64 [2]."""
    start, end = interval.unbind(-1)
    n = end - start
    reads = budget.count(n)
    reads = reads if reads.ndim == 3 else reads[:, None]  # [B, H or 1, Q]
    sink, recent = budget.sink, budget.recent
    slots, first, last = torch.arange(sink + recent, device=n.device), start[..., None], end[..., None]
    tokens = torch.where(slots < sink, first + slots, last + (slots - (sink + recent)))
    least = torch.where(slots < sink, first, first + sink)  # recent tokens are no sink tokens
    always = tokens.masked_fill((tokens < least) | (tokens >= last), -1)
    totals = torch.stack([reads.sum(), n.sum() * reads.shape[1]])
    counts = (reads - sink - recent).clamp(min=0)
    return Seen(interval, start[:, None], end[:, None], counts, always, n), totals


class Memo:
    """What the layers of one step share: computed by the first, for all that pass the same mask and key.

    A later step may reuse the mask tensor with new values. It is recognised by its layer: a new step starts at an
    earlier layer, or at the same one.
    """

    def __init__(self) -> None:
        self._step: tuple[Tensor, list[int], dict[Any, Any]] | None = None  # mask, last layer, results

    def of(self, mask: Tensor, layer: int, key: Any, find: Callable[[], Any]) -> Any:
        """Return the result of `find`, or that of an earlier layer with the same mask and key."""
        step = self._step
        # Each layer has a view of its own of the mask, whose memory this keeps alive.
        other = step is None or step[0].untyped_storage()._cdata != mask.untyped_storage()._cdata
        if step is None or other or layer <= step[1][0]:
            step = self._step = mask, [layer], {}  # one assignment: other threads have their own steps
        step[1][0], found = layer, step[2]
        if (known := found.get(key)) is None:
            known = found[key] = find()
        return known


class Numbers:
    """Counts on a device without a copy there: views of 0, 1, 2, ..."""

    def __init__(self) -> None:
        self._all: list[Tensor] = []  # the last is the longest; captured graphs may read the others

    def of(self, counts: list[int], q: Tensor) -> Tensor:
        """Return a count for each head and sequence of q [B, Hq, 1, D], int64 [B, H, 1], on its device."""
        numbers, most = self._all[-1] if self._all else None, max(counts)
        if numbers is None or len(numbers) <= most or numbers.device != q.device:
            with ordinary_tensors():
                numbers = torch.arange(2 * most + 1024, device=q.device)
            if not in_graph(q.device):  # in a capture they exist only when it is replayed
                self._all.append(numbers)
        return torch.stack([numbers[count] for count in counts])[:, None].expand(q.shape[0], -1, 1)
