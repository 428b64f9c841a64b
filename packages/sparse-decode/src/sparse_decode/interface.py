"""What Hugging Face calls in a sparse layer: the hook of its attention module, and the attention function.

The hook passes a `Call` to the attention function as a keyword argument, `sparse_decode`. It is passed as an argument
because threads share module state and context variables break compilation. What cannot be sparse is refused; rows that
need not be are dense; the others go through `SparseLayer.step`.

A small layer at a short context takes a millisecond, and our overhead must stay below 2 % of that: calls that are short
and plain leave early.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticLayer

from sparse_decode.attend import without_backward
from sparse_decode.caches.cache import CodedStaticLayer, Uncached, retype
from sparse_decode.caches.growing import FROM, GrowingLayer, Owned, may_grow
from sparse_decode.dense import (
    IGNORED_KEYWORDS,
    MASKED_PER_HEAD,
    OWN_FROM,
    Output,
    attend_by_torch,
    attend_densely,
    wants_weights,
)
from sparse_decode.inputs import Inputs, require
from sparse_decode.intervals import intervals_of, is_interval, mask_of_eager, mask_of_flash, mask_of_sdpa, require_width
from sparse_decode.model import CACHE_NAMES, FLASH, NAMES, NO_COPY, OTHER_STATES
from sparse_decode.modes import autocasts, no_autocast, readable
from sparse_decode.step import SparseLayer, attend_step

KEYWORD = "sparse_decode"
Carry = Callable[[SparseLayer, Any], CacheLayerMixin]
_OTHERS = frozenset(OTHER_STATES)
_SET = "_attn_implementation_internal"  # of a config; reading it as an attribute takes longer than the rest of the hook


@dataclass(slots=True, eq=False)
class Call:
    """What the attention function needs for one call: the sparse layer and its cache layer.

    It has no `to` method and no tensors, so that hooks that move a module's inputs to a device leave it unchanged.

    Attributes: short: whether the cache is plain, because the call is below the break-even; by_torch: whether the
        model's own attention is torch's.
    """

    layer: SparseLayer
    held: Any
    short: bool = False
    by_torch: bool = False


class Hook:
    """The forward pre-hook of a sparse layer's attention module.

    Args:
        arguments: the names of the module's positional arguments.
        ours: the config of the text decoder, and the attention implementation that it must name.
        coded: makes a cache carry codes in the sparse layer's place, and returns that layer.
        owned: the cache layers of the attachment.
        may_be_short: whether a cache layer may stay plain below the break-even.
    """

    def __init__(
        self, layer: SparseLayer, arguments: tuple[str, ...], ours: tuple[Any, str], coded: Carry, owned: Owned,
        may_be_short: bool,
    ):  # fmt: skip
        self.layer: SparseLayer = layer
        self._config, self._name = ours
        self._settings: dict[str, Any] = vars(self._config)
        self._arguments, self._coded, self._owned = arguments, coded, owned
        self._index, self._short = layer.layer, Call(layer, None, True, self._name == NAMES["sdpa"])
        self._below: int = layer.budget.dense_below if may_be_short else 0

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if "read_index" in kwargs or self._settings.get(_SET) is not self._name:
            self._require_ours(kwargs)
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs} if args else kwargs
        if not _OTHERS.isdisjoint(given) and any(given.get(name) is not None for name in OTHER_STATES):
            return None  # cross-attention
        kwargs[KEYWORD] = self._call(given)  # safe: torch makes a new dict for every call
        return None

    def _call(self, given: dict[str, Any]) -> Call:
        """Return the context of a call; the layer's cache then carries codes, unless it may stay plain."""
        cache = given.get(CACHE_NAMES[0])
        cache = given.get(CACHE_NAMES[1]) if cache is None else cache
        cache = getattr(cache, "self_attention_cache", cache)
        if isinstance(cache, Cache) and self._index < len(cache.layers):
            held: Any = cache.layers[self._index]
            encoder, kind = getattr(held, "encoder", None), type(held)
            if encoder is self.layer.encoder:
                return Call(self.layer, held)
            plain = encoder is None and kind in (DynamicLayer, GrowingLayer) and type(cache) is DynamicCache
            if self._below and plain and (call := self._if_short(cache, held, given)) is not None:
                return call
        return Call(self.layer, None if cache is None else self._coded(self.layer, cache))

    def _require_ours(self, kwargs: dict[str, Any]) -> None:
        """Raise ValueError in a step of continuous batching, or if another attention was set."""
        if "read_index" in kwargs:
            raise ValueError(
                "sparse attention does not support transformers' continuous batching; call detach() first, or serve "
                "with vLLM (sparse-serve)"
            )
        if (now := self._config._attn_implementation) != self._name:
            raise ValueError(
                f'attention was set to "{now}" while sparse attention is attached; call detach() before '
                "set_attn_implementation, and attach again"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY)

    def _if_short(self, cache: Cache, held: Any, given: dict[str, Any]) -> Call | None:
        """Return the context of a call after which the sequence is still too short to need codes; else None."""
        hidden = given.get("hidden_states")
        if hidden is None or cache.offloading:
            return None
        new = hidden.shape[1]
        n = held.keys.shape[2] if held.is_initialized and held.keys.numel() else 0
        if n + new >= self._below:
            return None
        if new > 1:  # a prompt: `attention` checks whether later steps can be sparse
            return Call(self.layer, held)
        if n >= FROM and type(held) is DynamicLayer and may_grow(hidden):
            retype(held, self._owned)
        return self._short


def register() -> None:
    """Register our attention with Hugging Face, and its masks, without which padding would be ignored."""
    for name, mask in {"sdpa": mask_of_sdpa, "eager": mask_of_eager, FLASH: mask_of_flash}.items():
        AttentionInterface.register(NAMES[name], attention)
        AttentionMaskInterface.register(NAMES[name], mask)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> Output:  # fmt: skip
    """Attend, sparsely in the rows that are sparse.

    Args: those of Hugging Face's attention functions, in their order, because kvpress passes dropout by position.
        Query [B, Hq, Q, D], key and value [B, Hkv, N, D], mask: see `sparse_decode.intervals`.
    Returns: [B, Q, Hq, D]; and the attention weights if eager attention is to return them, else None.
    Raises: ValueError if the call cannot be sparse, now or in a later step.
    """
    call: Call | None = kwargs.pop(KEYWORD, None)
    if call is None:
        return attend_densely(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if key.shape[2] > call.layer.reach:
        call.layer.warn_beyond(key.shape[2])
    plain = not dropout and attention_mask is None and kwargs.keys() <= IGNORED_KEYWORDS
    if call.short and plain and query.shape[2] == 1:
        n = key.shape[2]
        seen = query.shape[0] * query.shape[1] * n
        call.layer.tally.add(seen, seen)
        if call.by_torch and n < OWN_FROM.get(key.dtype, 256):
            return attend_by_torch(query, key, value, 0.0, scaling), None
        return attend_densely(module, query, key, value, None, 0.0, scaling)
    factor = float(query.shape[3] ** -0.5 if scaling is None else scaling)
    return AttentionCall(
        module, call.layer, call.held, query, key, value, attention_mask, dropout, factor, kwargs
    ).attend()


@dataclass
class AttentionCall:
    """Any call of a sparse layer: the arguments of `attention`, the layer and its cache layer.

    Attributes: factor: on the logits; length: number of tokens, int64 [], of a static cache, which a compiled graph
        must not read; whole: whether all of key and value is attended to: a static cache returns its whole buffers.
    """

    module: Any
    layer: SparseLayer
    held: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    factor: float
    kwargs: dict[str, Any]
    length: Tensor | None = None
    whole: bool = True

    def attend(self) -> Output:
        layer, held, rows, compiling = self.layer, self.held, self.query.shape[2], torch.compiler.is_compiling()
        if isinstance(held, StaticLayer):
            self.length = held.cumulative_length
            self.whole = compiling or (not layer.start and self._all_room())
        if compiling and layer.start:
            raise ValueError(f"sparse_rows={layer.start} works in calls that are not compiled alone; pass 0 or None")
        end = self._end()
        first = layer.first_sparse(rows, end)
        self._refuse(first < rows)
        if not compiling and self.module.__dict__.get(MASKED_PER_HEAD) is not None:
            raise ValueError(
                "sparse attention does not support keys masked per head (masked_key_indices, set by AdaKV presses); "
                "use a press that removes keys"
            )
        if not compiling and (rows > 1 or end == 1):
            self._require_serves()
        if first == rows:
            self._learn()
            return self._densely()
        device = self.query.device
        if autocasts(device):  # cast as torch's own attention does
            host = getattr(held, "on_host", False)  # its keys and values keep their dtype
            kind = self.key.dtype if host else torch.get_autocast_dtype(device.type)
            self.query, self.key, self.value = (x.to(kind) for x in (self.query, self.key, self.value))
        if compiling:
            return self._compiled(), None
        with no_autocast(device):
            return self._sparse(first)

    def _end(self) -> int:
        """Return the number of tokens attended to."""
        return self.key.shape[2] if self.whole else int(cast(Tensor, self.length))

    def _inputs(self, k: Tensor, v: Tensor) -> Inputs:
        return Inputs(self.query, k, v, self.factor, self.kwargs.get("softcap"), self.kwargs.get("s_aux"))

    def _view(self) -> Any:
        """Return the cache layer, or what stands in for one that carries no codes."""
        if getattr(self.held, "encoder", None) is not None:
            return self.held
        return Uncached(self.layer.encoder(self.key) if self.layer.selector.needs_codes else None)

    def _densely(self, rows: int | None = None) -> Output:
        """Attend as the model alone would, in the first `rows` rows; None: in all."""
        q, k, v, mask = self.query, self.key, self.value, self.mask
        if getattr(self.held, "on_host", False):
            k, v = k.to(q.device, non_blocking=True), v.to(q.device, non_blocking=True)
        if rows is not None:
            end = self._end() - q.shape[2] + rows
            q, k, v = q[:, :, :rows], k[:, :, :end], v[:, :, :end]
            mask = mask if mask is None else mask[:, :, :rows] if is_interval(mask) else mask[:, :, :rows, :end]
        return attend_densely(self.module, q, k, v, mask, self.dropout, self.factor, **self.kwargs)

    def _sparse(self, first: int) -> Output:
        """Run a call of which rows from `first` on may be sparse, outside of compiled graphs."""
        layer, q, end = self.layer, self.query, self._end()
        if not self.whole:
            self.key, self.value, self.whole = self.key[:, :, :end], self.value[:, :, :end], True
            self.mask = self.mask if self.mask is None or is_interval(self.mask) else self.mask[..., :end]
        interval = intervals_of(self.mask, q.shape[2], end)
        interval = interval if interval is None or not first else interval[:, first:]
        if readable(q) and end < layer.budget.dense_below:
            layer.count_dense(q[:, :, first:], interval, end)
            self._learn()
            return self._densely()
        if wants_weights(self.kwargs) and self.module.config._attn_implementation == NAMES["eager"]:
            raise ValueError("sparse rows have no attention weights; do not set output_attentions, or call detach()")
        view = self._view()
        if isinstance(view, CodedStaticLayer) and not readable(q) and not view.sums.ready and layer.remainder:  # pyright: ignore[reportOptionalMemberAccess]
            self._learn()
        dense = [self._densely(first)[0]] if first else []
        x = self._inputs(self.key, self.value)
        out = layer.step(x._replace(q=q[:, :, first:]), interval, view)
        return without_backward(torch.cat([*dense, out], 1) if first else out, q), None

    def _compiled(self) -> Tensor:
        """Run a call that may contain a sparse row inside a compiled graph: [B, Q, Hq, Dv]."""
        layer, x, held = self.layer, self._inputs(self.key, self.value), self.held
        static = isinstance(held, CodedStaticLayer)
        ready = layer.remainder is None or (static and held.sums is not None and held.sums.ready)
        ready = ready and (layer.remainder is None or (x.q.device, x.scaling) in layer.remainder.placed)
        step = static and x.q.is_cuda and x.q.shape[2] == 1 and is_interval(self.mask)
        if step and ready and layer.encoder.traceable(x.q):
            return layer.step(x, cast(Tensor, self.mask)[:, 0], held)
        codes = held.codes if getattr(held, "encoder", None) is not None else None
        sums = held.sums.tensors if static and layer.remainder is not None and held.sums is not None else []
        given = codes, self.mask, self.length, x.sinks, [*sums, layer.placeholder], layer.number
        return attend_step(*x[:3], *given, x.scaling, x.softcap)

    def _learn(self) -> None:
        """Add the tokens of a dense call to the remainder's sums of a static cache, so that no later step has to."""
        layer, held = self.layer, self.held
        if layer.remainder is None or not isinstance(held, CodedStaticLayer) or held.sums is None:
            return
        if torch.compiler.is_compiling():
            held.sums.ready = False
            return
        n = int(cast(Tensor, self.length))
        layer.remainder.on(self.key.device, self.factor)  # a compiled step needs them on the device already
        interval = intervals_of(self.mask, self.query.shape[2], self.key.shape[2]) if is_interval(self.mask) else None
        starts = None if interval is None else interval.expand(len(self.key), -1, -1)[:, -1, 0]
        held.sums.advance(self.key, self.value, starts, max(0, n - 1), self.key.device)

    def _all_room(self) -> bool:
        """Whether a step reads the whole room of a static cache, because reading its length would make the host wait.

        The mask hides the unfilled part. The sums of the remainder must include all earlier tokens.
        """
        if self.query.shape[2] > 1 or self.mask is None or readable(self.key):
            return False
        held = self.held
        return self.layer.remainder is None or (
            isinstance(held, CodedStaticLayer) and held.sums is not None and held.sums.ready
        )

    def _refuse(self, sparse: bool) -> None:
        """Raise ValueError if a call asks for what sparse attention, now or in later steps, does not support."""
        kwargs = self.kwargs
        if kwargs.get("position_bias") is not None:
            raise ValueError("sparse attention does not support position_bias; leave this model dense")
        both = not getattr(self.module, "is_causal", True) and not is_interval(self.mask) and self.query.shape[2] > 1
        if sparse and (both or kwargs.get("is_causal") is False):
            raise ValueError("sparse attention is causal, got is_causal=False; leave this model dense")
        if self.dropout and (sparse or not torch.is_grad_enabled()):  # dropout is fine in dense calls of training
            raise ValueError(f"sparse attention has no dropout, got {self.dropout}; call model.eval() first")

    def _require_serves(self) -> None:
        """Raise ValueError if a prompt is of a form that cannot be sparse in a later step."""
        layer, held, query, key = self.layer, self.held, self.query, self.key
        coded = getattr(held, "encoder", None) is not None
        if layer.selector.needs_codes and (coded or type(held) in (DynamicLayer, GrowingLayer)):
            own = cast(Tensor, held.keys)
            if key.shape != own.shape or not _same_memory(key, own):
                raise ValueError(
                    f"layer {layer.layer} must attend to the keys in its cache, {tuple(own.shape)}, got other keys, "
                    f"{tuple(key.shape)}; leave this model dense"
                )
            if not coded and layer.hashes is not None:
                layer.hashes.of_keys(layer.layer, key)  # codes of now are refused when they are made
            codes = cast(Tensor, held.codes).shape[1] if coded else key.shape[1]
            if codes not in (key.shape[1], query.shape[1]):
                raise ValueError(
                    f"layer {layer.layer} needs codes of {key.shape[1]} KV heads or {query.shape[1]} query heads, got "
                    f"{codes}; the head counts in the model's config are wrong"
                )
        if layer.own is None and not autocasts(query.device):
            group = 1 if getattr(layer.selector, "per_query_head", False) else query.shape[1] // key.shape[1]
            require(query.device, query.dtype, (key.shape[3], self.value.shape[3]), group)
        if self.mask is not None and self.mask.dim() == 4 and not is_interval(self.mask):
            require_width(self.mask, query.shape[2], key.shape[2])
            intervals_of(self.mask[:, :, -1:], 1, key.shape[2])  # the last row's, as of later steps


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors start at the same memory; also works for tensors without memory (fake, meta)."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and int(a.storage_offset()) == b.storage_offset()
