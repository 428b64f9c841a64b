"""The steps of transformers' continuous batching: rows of all requests side by side, keys and codes in their blocks.

One call of a layer has the new tokens of every scheduled request in one row of tokens: whole prompts, chunks of them,
and single tokens. A sparse layer

1. writes keys and values to the blocks, and hashes the keys to codes there (`sparse_decode.pages.paged`);
2. attends densely in the rows of prompts, request by request, with the model's own attention;
3. searches and attends in the pages for all rows after the prompt: `PagedLayer.decode`.

A row is after the prompt by its position, and by the length of the prompt that the request came with: the last token of
a prompt is dense even alone, and tokens that are read again because their blocks were taken stay sparse, one by one.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_decode.budget import Budget
from sparse_decode.interface import KEYWORD, AttentionContext, refuse_attention
from sparse_decode.layer.dense_step import EAGER, QKV, Output, attend_densely
from sparse_decode.layer.plan import LayerPlan
from sparse_decode.pages.paged import PagedLayer, Pages, Step
from sparse_decode.positions import visible_rows
from sparse_decode.select import HashSelector

Plans = Mapping[int, LayerPlan]
MARK = "_sparse_decode"
"""Attribute of a paged cache: its `CodedBlocks`."""
PACKED = (
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "read_index", "write_index", "block_table"),
    *("logits_indices", "logits_processor_args", "is_causal", "use_cache", "position_ids"),
)
"""Keyword arguments that describe a step; the others are the layer's."""


class Piece(NamedTuple):
    """Rows of one request that attend densely."""

    rows: slice
    """Its query tokens in the step."""
    keys: slice
    """What the last of them sees, among the keys of all requests."""


class Packed:
    """What all layers need to know of a step.

    Args: blocks: of the full-attention layers; borders: positions from which each request's rows are sparse.
    Attributes:
        given: the keyword arguments `PACKED` of the step.
        slots: page slot of each new token, int64 [T].
        index: page slot of each visible token, request after request, int64 [N].
        whole: all rows of each request, by type of layer.
        dense: the rows of sparse layers that attend densely.
        rows: the other ones, int64 [B].
    """

    def __init__(self, given: Mapping[str, Any], blocks: "CodedBlocks", borders: list[int]):
        self.given: Mapping[str, Any] = given
        self._pages = blocks.count, blocks.size
        read, write = (given[name][blocks.index] for name in ("read_index", "write_index"))
        self.slots: Tensor = blocks.slots(write)
        self.index: Tensor = blocks.slots(read) if len(read) else self.slots  # nothing to read: all keys are new
        starts = given["cu_seq_lens_q"].tolist()
        if len(starts) != len(borders) + 1:
            raise ValueError(f"a step must have rows of its {len(borders)} requests, got {len(starts) - 1}")
        self.whole: dict[str, list[Piece]] = {}
        for kind, bounds in given["cu_seq_lens_k"].items():
            rows, keys = itertools.pairwise(starts), itertools.pairwise(bounds.tolist())
            self.whole[kind] = [Piece(slice(*at), slice(*seen)) for at, seen in zip(rows, keys, strict=True)]
        self.dense: list[Piece] = []
        self._split(self.whole[blocks.kind], borders)
        self._steps: dict[Budget, Step] = {}
        self._masks: dict[tuple[object, ...], Tensor] = {}

    def _split(self, requests: list[Piece], borders: list[int]) -> None:
        rows: list[int] = []
        lengths: list[int] = []
        tables: list[Tensor] = []
        for (at, seen), border in zip(requests, borders, strict=True):
            new, first = at.stop - at.start, seen.start
            past = seen.stop - first - new
            dense = min(max(border - past, 0), new)
            if dense:
                self.dense.append(Piece(slice(at.start, at.start + dense), slice(first, first + past + dense)))
            if dense < new:
                rows += range(at.start + dense, at.stop)
                lengths += range(past + dense + 1, past + new + 1)
                tables += [self.index[seen][:: self._pages[1]] // self._pages[1]] * (new - dense)
        self.rows: Tensor = torch.tensor(rows, dtype=torch.int64)
        self._lengths = torch.tensor(lengths, dtype=torch.int64)
        self._tables = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True) if tables else None

    def step(self, budget: Budget) -> Step:
        """Return the sparse rows as a step in pages, created once for all layers with this budget."""
        if budget not in self._steps:
            assert self._tables is not None
            self._steps[budget] = Step.of(self._tables, self._lengths, budget, *self._pages)
        return self._steps[budget]

    def mask(self, piece: Piece, window: int | None, like: Tensor, eager: bool) -> Tensor | None:
        """Return the causal mask of a piece, [1, 1, R, N]; None where the model's attention needs none."""
        rows, n = piece.rows.stop - piece.rows.start, piece.keys.stop - piece.keys.start
        if rows == 1 or (not eager and rows == n and n <= (window or n)):
            return None
        made = self._masks.get((rows, n, window))
        if made is None:
            made = visible_rows(None, 0, rows, rows, n, like.device)
            assert made is not None
            if window:
                made = made.triu(n - rows - window + 1)
            if eager:
                made = torch.zeros_like(made, dtype=like.dtype).masked_fill_(~made, torch.finfo(like.dtype).min)
            self._masks[rows, n, window] = made
        return made


class CodedBlocks:
    """The blocks of a paged cache of transformers, with codes behind the keys and values of all layers.

    Args:
        cache: made for a model with `extra` more layers, whose pages hold the codes (`batching.code_layers`).
        plans: the sparse layers; words: 32-bit words of a code.
        prompts: returns the lengths of the prompts of the requests in the current step, in their order.
    Attributes:
        kind, index: the type of the sparse layers, and its number in the cache; size: tokens of a page; count: blocks.
    Raises: ValueError if the blocks are not laid out as in the versions of transformers that this was written for.
    """

    def __init__(self, cache: Any, plans: Plans, words: int, extra: int, prompts: Callable[[], list[int]]):
        allocator = cache.layer_to_allocator[min(plans)]
        self.kind: str = allocator.layer_type
        self.index: int = allocator.index
        self.size: int = allocator.tokens_per_page
        self._prompts, self._start = prompts, plans[min(plans)].rule.start
        self._step: Packed | None = None
        heads, dim, kind = allocator.num_key_value_heads, allocator.head_dim, allocator.cache_dtype
        memory, block = cache.cache_tensor, allocator.bytes_per_block
        self.count: int = memory.numel() // block
        token = heads * dim * kind.itemsize
        self._stride = block // token
        page, layers = 2 * self.size * token, len(allocator.layer_indices)
        codes, end = 4 * self.size * heads * words, (layers - extra) * page
        if page * layers != block or end + codes * len(plans) > block:
            raise ValueError(f"blocks must have {layers} pages of {page} bytes, got {block} bytes")
        shape, rows = (self.count, heads, self.size), (heads * dim, dim)
        self.pages: dict[int, Pages] = {}
        for order, layer in enumerate(sorted(plans)):
            at = allocator.layer_indices.index(layer) * page
            k, v = (
                _view(memory, kind, start, (*shape, dim), (block, rows[1], rows[0])) for start in (at, at + page // 2)
            )
            at = end + order * codes
            own = _view(memory, torch.int32, at, (*shape, words), (block, self.size * words, words))
            self.pages[layer] = Pages(k, v, own)
            self._require_written(allocator, layer)

    def slots(self, index: Tensor) -> Tensor:
        """Convert transformers' indices, tokens of keys from the first block on, to page slots, int64 [T]."""
        return index // self._stride * self.size + index % self._stride

    def _require_written(self, allocator: Any, layer: int) -> None:
        """Raise ValueError unless what transformers writes is found in the pages; writes where it writes padding."""
        pages, at = self.pages[layer], torch.tensor([0, self.size - 1]) + allocator.write_trash_index
        k, v = torch.arange(4 * pages.k[0, :, 0].numel()).to(pages.k.dtype).view(2, 2, *pages.k.shape[1::2])
        allocator.update(k, v, layer, at[:0], at)
        block, place = self.slots(at) // self.size, self.slots(at) % self.size
        if not (torch.equal(pages.k[block, :, place], k) and torch.equal(pages.v[block, :, place], v)):
            raise ValueError("keys that the cache writes must lie token by token in pages, got another layout")

    def step(self, given: Mapping[str, Any]) -> Packed:
        """Return what layers need to know of a step, created by the first of them."""
        if self._step is None or self._step.given["cu_seq_lens_k"] is not given["cu_seq_lens_k"]:
            prompts = self._prompts()
            borders = prompts if self._start is None else [self._start] * len(prompts)
            self._step = Packed(given, self, borders)
        return self._step

    def end_step(self) -> None:
        """Let go of a step: its masks are as large as its keys."""
        self._step = None


def _view(memory: Tensor, kind: torch.dtype, at: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """View bytes as [M, H, S, C] from byte `at` on; strides: bytes of a block, elements of head and token."""
    block, *rest = strides
    return memory.view(kind).as_strided(shape, (block // kind.itemsize, *rest, 1), at // kind.itemsize)


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> Output:  # fmt: skip
    """Attend in a step of continuous batching, with the signature of Hugging Face's attention functions.

    Args: query [1, Hq, T, D], key and value [1, Hkv, T, D] of the new tokens of all requests; no mask.
    Returns: [1, T, Hq, D], and None.
    """
    call: AttentionContext | None = kwargs.pop(KEYWORD, None)
    given, cache = {name: kwargs.pop(name, None) for name in PACKED}, kwargs.pop("cache", None)
    held: CodedBlocks | None = getattr(cache, MARK, None)
    if held is None:
        refuse_attention(module.config._attn_implementation)
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise ValueError("sparse attention supports neither masks nor biases in continuous batching; call detach()")
    packed, out = held.step(given), query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
    rest = packed, float(query.shape[3] ** -0.5 if scaling is None else scaling), kwargs, out
    if call is None:
        _attend_whole(module, (query, key, value), cache, *rest)
    else:
        _attend_sparsely(module, (query, key, value), held.pages[call.plan.layer], *rest, call.plan)
    return out, None


def _attend_whole(
    module: Any, qkv: QKV, cache: Any, packed: Packed, factor: float, options: dict[str, Any], out: Tensor
) -> None:
    """Attend in a layer that is dense, or slides: all requests one by one, their keys read by the cache itself."""
    allocator, (query, key, value) = cache.layer_to_allocator[module.layer_idx], qkv
    k, v = cache.update(key, value, module.layer_idx, dict(packed.given))
    for piece in packed.whole[allocator.layer_type]:
        window, kv = getattr(allocator, "sliding_window", None), (k[:, :, piece.keys], v[:, :, piece.keys])
        _attend(module, (query, *kv), piece, packed, window, factor, options, out)


def _attend_sparsely(
    module: Any, qkv: QKV, pages: Pages, packed: Packed, factor: float, options: dict[str, Any], out: Tensor,
    plan: LayerPlan,
) -> None:  # fmt: skip
    """Write and attend in a sparse layer."""
    query, key, value = qkv
    assert isinstance(plan.selector, HashSelector)
    layer = PagedLayer(plan.layer, plan.selector, factor, options.get("softcap"), options.get("s_aux"))
    k, v = (x[0].transpose(0, 1) for x in (key, value))
    pages.write(packed.slots, k, v, layer.encode(k))
    for piece in packed.dense:
        kv = _gather(pages, packed.index[piece.keys])
        _attend(module, (query, *kv), piece, packed, None, factor, options, out)
    if len(packed.rows):
        rows = query[0].transpose(0, 1)[packed.rows]
        out[0, packed.rows] = layer.decode(rows, pages, packed.step(plan.budget))
        plan.tally.add(layer.selected, layer.visible)


def _gather(pages: Pages, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Gather keys and values of tokens, [1, Hkv, N, D] each."""
    block, place = slots // pages.k.shape[2], slots % pages.k.shape[2]
    k, v = (x[block, :, place].transpose(0, 1)[None] for x in (pages.k, pages.v))
    return k, v


def _attend(
    module: Any, qkv: QKV, piece: Piece, packed: Packed, window: int | None, factor: float, options: dict[str, Any],
    out: Tensor,
) -> None:  # fmt: skip
    """Attend densely in the rows of a piece, as the model alone would do with this request."""
    query, k, v = qkv
    mask = packed.mask(piece, window, query, module.config._attn_implementation in EAGER)
    out[:, piece.rows] = attend_densely(module, query[:, :, piece.rows], k, v, mask, 0.0, factor, **options)[0]
