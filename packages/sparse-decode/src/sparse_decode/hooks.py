"""The forward pre-hook of an attention module, which passes an `AttentionContext` to the attention function.

Most calls at short contexts are alike: one token and a plain cache. The hook does as little as possible for them: a
small layer takes a millisecond, and the overhead must stay below 2 % of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from sparse_decode.dense_step import MOST_ROWS
from sparse_decode.growing import FROM, GrowingLayer, grow
from sparse_decode.interface import KEYWORD, AttentionContext, Short
from sparse_decode.model import CACHE_NAMES, OTHER_STATES
from sparse_decode.plan import LayerPlan

_OTHERS = frozenset(OTHER_STATES)
_SET = "_attn_implementation_internal"  # of a config; reading it as an attribute takes longer than the rest of the hook


NO_COPY = (
    "a model to which sparse attention is attached cannot be copied or pickled; call detach() first, and attach to the "
    "copy"
)


class Hook:
    """The forward pre-hook of a sparse layer's attention module.

    Args:
        plan: the layer's plan; arguments: the names of the module's positional arguments.
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
        self,
        plan: LayerPlan,
        arguments: tuple[str, ...],
        ours: tuple[Any, str],
        coded: Callable[[LayerPlan, Any], CacheLayerMixin],
        growing: WeakSet[CacheLayerMixin],
        may_be_short: bool,
    ):
        self.plan: LayerPlan = plan
        self._arguments = arguments
        self._config, self._name = ours
        self._settings: dict[str, Any] = vars(self._config)
        self._coded = coded
        self._growing = growing
        self._layer, self._short = plan.layer, Short(plan, self._name)
        below: Any = plan.budget.dense_below
        self._below: int = below if may_be_short else 0

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._require_ours(kwargs)
        if self._below and not args and (call := self._if_short(kwargs)) is not None:
            kwargs[KEYWORD] = call  # safe: torch makes a new dict for every call
            return None
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        if any(given.get(name) is not None for name in OTHER_STATES):
            return args, kwargs  # cross-attention
        if args and self._below and (call := self._if_short(given)) is not None:
            return args, {**kwargs, KEYWORD: call}
        return args, {**kwargs, KEYWORD: self._context(given)}

    def _context(self, given: dict[str, Any]) -> AttentionContext:
        """Return the context of a call, after making the layer's cache carry codes if it does not yet."""
        cache = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
        if isinstance(cache, Cache) and self._layer < len(cache.layers):
            held: Any = cache.layers[self._layer]
            if getattr(held, "encoder", None) is self.plan.encoder:
                return AttentionContext(self.plan, held)
        return AttentionContext(self.plan, None if cache is None else self._coded(self.plan, cache))

    def _require_ours(self, kwargs: dict[str, Any]) -> None:
        """Raise ValueError if the call uses a paged cache, or another attention implementation was set."""
        if "read_index" in kwargs:
            _refuse_paged()
        if self._settings.get(_SET) is self._name:
            return
        if (now := self._config._attn_implementation) != self._name:
            _refuse_attention(now)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY)

    def _if_short(self, given: dict[str, Any]) -> AttentionContext | None:
        """Return the context of a call after which the sequence is still too short to need codes; else None."""
        cache, hidden = given.get(CACHE_NAMES[0]), given.get("hidden_states")
        if type(cache) is not DynamicCache or hidden is None or cache.offloading or not _OTHERS.isdisjoint(given):
            return None
        if self._layer >= len(layers := cache.layers):
            return None
        held: Any = layers[self._layer]
        kind = type(held)
        if kind is not DynamicLayer and kind is not GrowingLayer:
            return None
        new = hidden.shape[1]
        n = held.keys.shape[2] if held.is_initialized and held.keys.numel() else 0
        if n + new >= self._below:
            return None
        if new > 1:  # a prompt: `attention` checks whether later steps can be sparse
            return AttentionContext(self.plan, held)
        if n >= FROM and kind is DynamicLayer and _may_grow(hidden):
            grow(held, self._growing)
        return self._short


def _may_grow(hidden: Tensor) -> bool:
    """Whether the cache of a layer with these hidden states may be written in place."""
    return hidden.device.type == "cpu" and not hidden.requires_grad and not torch.compiler.is_compiling()


class ExactHook(Hook):
    """The hook of exact mode: sparse while tokens are drafted with a cache, dense otherwise.

    Args: drafting: whether tokens are being drafted with a cache; grows: makes the dense layers of a cache grow in
        place; the others as in `Hook`.
    """

    __slots__ = ("_drafting", "_grows")

    def __init__(
        self,
        plan: LayerPlan,
        arguments: tuple[str, ...],
        ours: tuple[Any, str],
        coded: Callable[[LayerPlan, Any], CacheLayerMixin],
        growing: WeakSet[CacheLayerMixin],
        drafting: Callable[[object], bool],
        grows: Callable[[object], None],
    ):
        super().__init__(plan, arguments, ours, coded, growing, may_be_short=False)
        self._drafting, self._grows = drafting, grows

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs} if args else kwargs
        cache = given.get(CACHE_NAMES[0])
        if self._drafting(cache):
            return super().__call__(module, args, kwargs)
        self._require_ours(kwargs)
        hidden = given.get("hidden_states")
        if type(cache) is not DynamicCache or hidden is None or self._layer >= len(cache.layers):
            return None
        held: Any = cache.layers[self._layer]
        keys: Any = held.keys if type(held) is DynamicLayer and held.is_initialized else None
        if keys is None or not keys.numel() or hidden.shape[1] > MOST_ROWS:
            return None
        if keys.shape[2] >= FROM and _may_grow(hidden):
            grow(held, self._growing)
            self._grows(cache)
        return None


def _refuse_attention(now: str) -> None:
    """Raise ValueError because another attention implementation was set."""
    raise ValueError(
        f'attention was set to "{now}" while sparse attention is attached; call detach() before '
        "set_attn_implementation, and attach again"
    )


def _refuse_paged() -> None:
    """Raise ValueError because continuous batching called the module; transformers then sets its own attention."""
    raise ValueError(
        "sparse attention does not support the paged cache of continuous batching (generate_batch, transformers "
        "serve); call detach() first, use generate, or serve with the package sparse-serve"
    )
