"""What Hugging Face calls in a sparse layer: the hook of its attention module, and the attention function.

The hook passes an `AttentionContext` to the attention function as a keyword argument, `sparse_decode`. It is passed as
an argument because threads share module state and context variables break compilation.

Most calls are alike: one token and no options. For those, the hook and the function do as little as possible. A small
layer at a short context takes a millisecond, and the hook's overhead must stay below 2 % of that; a longer one takes a
step in one go (`LayerPlan.step`). `sparse_decode.layer.calls` runs all other calls.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.masking_utils import eager_mask, flash_attention_mask, sdpa_mask
from transformers.utils.output_capturing import _active_collector

from sparse_decode.attention.attend_inputs import Inputs
from sparse_decode.caches.cache import CodedDynamicLayer
from sparse_decode.caches.growing import FROM, GrowingLayer, grow
from sparse_decode.layer import calls
from sparse_decode.layer.dense_step import MASKED, OWN_FROM, QUIET, Output, attend_by_torch, attend_densely
from sparse_decode.layer.plan import LayerPlan
from sparse_decode.model import CACHE_NAMES, FLASH, NAMES, OTHER_STATES

KEYWORD = "sparse_decode"
NO_COPY = (
    "a model to which sparse attention is attached cannot be copied or pickled; call detach() first, and attach to the "
    "copy"
)
Coded = Callable[[LayerPlan, Any], CacheLayerMixin]
Growing = WeakSet[CacheLayerMixin]
_OTHERS = frozenset(OTHER_STATES)
_tuple: Callable[[type[Inputs], tuple[Any, ...]], Inputs] = tuple.__new__
_SET = "_attn_implementation_internal"  # of a config; reading it as an attribute takes longer than the rest of the hook


class AttentionContext:
    """What the attention function needs for one call: the layer's plan and its cache layer.

    It has no `to` method and no tensors, so that hooks that move a module's inputs to a device leave it unchanged.
    """

    __slots__ = ("cache", "plan")

    def __init__(self, plan: LayerPlan, cache: CacheLayerMixin | None):
        self.plan: LayerPlan = plan
        self.cache: CacheLayerMixin | None = cache


class Short(AttentionContext):
    """The context of a call below the break-even, whose cache is plain. One object serves all calls of a layer.

    Attributes: name: of our attention; by_torch: whether the model's own is torch's, which needs no checks then.
    """

    __slots__ = ("by_torch", "count", "name")

    def __init__(self, plan: LayerPlan, name: str):
        super().__init__(plan, None)
        self.count: Callable[[int, int], None] = plan.count_short
        self.name: str = name
        self.by_torch: bool = name == NAMES["sdpa"]


class Hook:
    """The forward pre-hook of a sparse layer's attention module.

    Args:
        arguments: the names of the module's positional arguments.
        ours: the config of the text decoder, and the attention implementation that it must name.
        coded: makes a cache carry codes in the plan's layer, and returns that layer.
        growing: the cache layers that grow in place and carry no codes.
        may_be_short: whether a cache layer may stay plain below the break-even.
    """

    __slots__ = (
        "_arguments",
        "_below",
        "_coded",
        "_config",
        "_growing",
        "_layer",
        "_name",
        "_settings",
        "_short",
        "plan",
    )

    def __init__(
        self, plan: LayerPlan, arguments: tuple[str, ...], ours: tuple[Any, str], coded: Coded, growing: Growing,
        may_be_short: bool,
    ):  # fmt: skip
        self.plan: LayerPlan = plan
        self._config, self._name = ours
        self._settings: dict[str, Any] = vars(self._config)
        self._arguments, self._coded, self._growing = arguments, coded, growing
        self._layer, self._short = plan.layer, Short(plan, self._name)
        below: Any = plan.budget.dense_below
        self._below: int = below if may_be_short else 0

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if "read_index" in kwargs or self._settings.get(_SET) is not self._name:
            self._require_ours(kwargs)
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs} if args else kwargs
        if not _OTHERS.isdisjoint(given) and any(given.get(name) is not None for name in OTHER_STATES):
            return None  # cross-attention
        cache, call = given.get(CACHE_NAMES[0]), None
        if type(cache) is DynamicCache and self._layer < len(cache.layers):
            held: Any = cache.layers[self._layer]
            kind = type(held)
            if kind is CodedDynamicLayer and held.encoder is self.plan.encoder:
                call = AttentionContext(self.plan, held)
            elif self._below and (kind is DynamicLayer or kind is GrowingLayer):
                call = self._if_short(cache, held, given)
        kwargs[KEYWORD] = call or self._context(given)  # safe: torch makes a new dict for every call
        return None

    def _context(self, given: dict[str, Any]) -> AttentionContext:
        """Return the context of a call, after making the layer's cache carry codes if it does not yet."""
        cache = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
        if isinstance(cache, Cache) and self._layer < len(cache.layers):
            held: Any = cache.layers[self._layer]
            if getattr(held, "encoder", None) is self.plan.encoder:
                return AttentionContext(self.plan, held)
        return AttentionContext(self.plan, None if cache is None else self._coded(self.plan, cache))

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

    def _if_short(self, cache: Cache, held: Any, given: dict[str, Any]) -> AttentionContext | None:
        """Return the context of a call after which the sequence is still too short to need codes; else None."""
        hidden = given.get("hidden_states")
        if hidden is None or cache.offloading:
            return None
        new = hidden.shape[1]
        n = held.keys.shape[2] if held.is_initialized and held.keys.numel() else 0
        if n + new >= self._below:
            return None
        if new > 1:  # a prompt: `attention` checks whether later steps can be sparse
            return AttentionContext(self.plan, held)
        if n >= FROM and type(held) is DynamicLayer and may_grow(hidden):
            grow(held, self._growing)
        return self._short


def may_grow(hidden: Tensor) -> bool:
    """Whether the cache of a layer with these hidden states may be written in place."""
    return hidden.device.type == "cpu" and not hidden.requires_grad and not torch.compiler.is_compiling()


def register() -> None:
    """Register our attention with Hugging Face, and its masks, without which padding would be ignored."""
    masks = {"sdpa": sdpa_mask, "eager": mask_of_eager, FLASH: mask_of_flash}
    for name, mask in masks.items():
        AttentionInterface.register(NAMES[name], attention)
        AttentionMaskInterface.register(NAMES[name], mask)


def mask_of_eager(*, q_length: int, **how: Any) -> Tensor | None:
    """Build eager attention's mask; None for one row that sees every token, as for torch's attention.

    Args: those of transformers' `eager_mask`, by name.
    """
    if q_length == 1 and sdpa_mask(q_length=1, **how) is None:
        return None
    return eager_mask(q_length=q_length, **how)


def mask_of_flash(*, q_length: int, **how: Any) -> Tensor | None:
    """Build flash attention's mask, bool [B, N] or None; for one row torch's, which sparse steps read.

    Args: those of transformers' mask functions, by name.
    """
    return (sdpa_mask if q_length == 1 else flash_attention_mask)(q_length=q_length, **how)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> Output:  # fmt: skip
    """Attend, sparsely in the rows that the plan makes sparse.

    Args: those of Hugging Face's attention functions, in their order, because kvpress passes dropout by position.
        Query [B, Hq, Q, D], key and value [B, Hkv, N, D], mask [B, 1, Q, N] or None.
    Returns: [B, Q, Hq, D]; and the attention weights if eager attention is to return them, else None.
    Raises: ValueError if the call cannot be sparse, now or in a later step.
    """
    call: AttentionContext | None = kwargs.pop(KEYWORD, None)
    if type(call) is Short and attention_mask is None and not dropout and kwargs.keys() <= QUIET:
        batch, heads, rows, _ = query.shape
        if rows == 1:
            call.count(batch * heads, key.shape[2])
            if call.by_torch and key.shape[2] < OWN_FROM.get(key.dtype, 256):
                return attend_by_torch(query, key, value, 0.0, scaling), None
            return attend_densely(module, query, key, value, None, 0.0, scaling, call.name)
    if call is None:
        return attend_densely(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    factor = float(query.shape[3] ** -0.5 if scaling is None else scaling)
    if type(call) is AttentionContext and attention_mask is None and _is_plain(module, query, dropout, kwargs):
        options = kwargs.get("softcap"), kwargs.get("s_aux")
        # `Inputs(...)` would be a call in Python.
        x = _tuple(Inputs, (query, key, value, factor, *options))
        out = call.plan.step(call.cache, x)
        if out is not None:
            return out, None
    given = query, key, value, attention_mask, dropout, factor, kwargs
    return calls.attend(calls.Call(module, call.plan, call.cache, *given))


def _is_plain(module: Any, query: Tensor, dropout: float, kwargs: dict[str, Any]) -> bool:
    """Whether a call without a mask is a decode step without options, which `LayerPlan.step` may run as a whole."""
    if query.shape[2] != 1 or not query.shape[0] or dropout or torch.compiler.is_dynamo_compiling():
        return False
    kind = "cpu"
    if type(query) is not Tensor or not query.is_cpu:
        kind = query.device.type
        if kind != "cuda" or torch.compiler.is_compiling():
            return False
    if query.requires_grad or torch.is_autocast_enabled(kind) or _active_collector.get():
        return False
    if not kwargs.keys() <= QUIET:
        if kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
            return False
        if kwargs.get("output_attentions"):
            return False
    return module.__dict__.get(MASKED) is None
