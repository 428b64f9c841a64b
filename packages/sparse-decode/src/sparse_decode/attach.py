"""Attach sparse attention to a model, and detach it."""

# Configs of transformers have no types.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, cast
from weakref import WeakSet

import torch
from hashtrain import ModelShape
from hashtrain.models import text_decoder
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from sparse_decode.budget import Budget
from sparse_decode.caches.cache import CodedDynamicLayer
from sparse_decode.caches.cache_types import CODED, cache_layer, carry_codes, is_quantised
from sparse_decode.caches.growing import GrowingLayer, grow, stop_growing
from sparse_decode.caches.offload import HostLayer
from sparse_decode.costs.forecast import Forecast, forecast
from sparse_decode.generation.batching import Batching
from sparse_decode.generation.exact import Drafts, ExactHook, retype
from sparse_decode.generation.exact_refusals import require_exact, require_forgets
from sparse_decode.hashing.hashers import KeyQueryHasher
from sparse_decode.interface import NO_COPY, Hook, register
from sparse_decode.layer.blocks import RowRule
from sparse_decode.layer.plan import Backend, LayerPlan
from sparse_decode.model import (
    FLASH_NAME,
    NAMES,
    Attention,
    AttentionName,
    dense_modules,
    dense_name,
    require_attachable,
    set_attention,
)
from sparse_decode.parallel import shard_shape
from sparse_decode.planning import Options, plan_layers, require_flash, require_rows, usual_budget
from sparse_decode.reach import ReachHook
from sparse_decode.select import Selector


def attach(
    model: PreTrainedModel,
    selector: KeyQueryHasher | Selector | None,
    budget: Budget | None = None,
    *,
    layer_budgets: Mapping[int, Budget] | None = None,
    dense_layers: int | Collection[int] | None = None,
    sparse_rows: Literal["decode"] | int = "decode",
    max_decode_rows: int = 1,
    kv: Literal["device", "host"] = "device",
    remainder: bool = True,
    backend: Backend = "gather",
    exact: int | None = None,
) -> "Attachment":
    """Make the full-attention layers of a causal language model sparse.

    Args:
        model: a Hugging Face decoder with "sdpa" or "eager" attention. Its files and weights are not changed.
        selector: a hasher (such as `hashtrain.Hasher`), another `Selector`, or None to keep every layer dense.
        budget: tokens per row. Default: 2 %, divided among layers and, but with "flash", KV heads if the hasher has
            shares for them (`by_layer`, `by_head`), with decode steps dense below the context length from which a
            sparse step is predicted to be faster (`dense_below="predicted"`), so that attaching slows no step down.
        layer_budgets: budgets of single layers, which replace `budget` there.
        dense_layers: the layers that stay dense: the number of first layers, or a set of indices. Default: the layers
            that the hasher lists, because training measured a high cost for them; none with another selector.
        sparse_rows: "decode": prefill is dense, decode steps are sparse. An integer n: in every call, rows from
            position n of their sequence on are sparse. One forward pass then scores a whole text as token-by-token
            decoding after a dense prefill of n tokens would (n = 0: all rows are sparse). With n = the length of the
            prompt, prefill stays dense however it is chunked.
        max_decode_rows: with "decode", a call with a non-empty cache and at most this many query tokens is a decode
            step. Raise it for assisted decoding, which checks several tokens at once. A last chunk of prefill of at
            most this size is then a decode step, too.
        kv: where the sparse layers of dynamic caches store keys and values. "host": in host memory, pinned if there is
            a GPU; codes stay on the device, and a sparse step copies only the selected rows to it.
        remainder: add the unselected tokens of each row as one token of mean value and estimated weight (eq. 15, 16),
            if the hasher is calibrated for it, as those of `hashtrain` are; see `Attachment.remainder`. The mask may
            then not change for earlier tokens: a decode step on CUDA does not check this, and outputs NaN in such a
            row until the cache is discarded. On the CPU the sums are recomputed; a compiled step raises an error.
        backend: the attention implementation. "gather": our kernels, and the model's own attention for dense calls.
            "flash": flash-attn (extra `sparse-decode[flash]`) for dense calls and over rows gathered by torch, as in
            the paper. "flash" needs CUDA and 16-bit types, and supports no padding, remainder, learned sinks, sliding
            layers or static caches.
        exact: exact mode. `generate` returns what the dense model returns: the same tokens when greedy, the same
            distribution when sampling. Sparse steps draft at most this many tokens (up to 15), and one dense pass
            checks them. All other calls of the model are dense. Fewer tokens, down to none, are drafted where that is
            predicted to be faster; with an integer `dense_below` in the budget, at least one from that context length
            on. Batch size 1 only.
    Returns: the attachment. Use it in a `with` statement, or keep it and call `detach()`. `forecast(batch, tokens)`
        predicts the memory of a run; `memory(cache)` measures that of a cache.
    Raises: ValueError if the model, its attention or the hasher is not supported; the model is then unchanged.
    """
    require_rows(dense_layers, sparse_rows, max_decode_rows)
    if kv not in ("device", "host"):
        raise ValueError(f'kv must be "device" or "host", got {kv!r}')
    if backend not in ("gather", "flash"):
        raise ValueError(f'backend must be "gather" or "flash", got {backend!r}')
    if exact is not None:
        require_exact(exact, selector, sparse_rows, max_decode_rows, kv, backend)
    rule = RowRule(None if sparse_rows == "decode" else sparse_rows, max_decode_rows)
    dense = getattr(selector, "dense_layers", ()) if dense_layers is None else dense_layers
    dense = range(dense) if isinstance(dense, int) else dense
    given: list[object] = [*(() if budget is None else (budget,)), *(layer_budgets or {}).values()]
    if others := [one for one in given if not isinstance(one, Budget)]:
        raise ValueError(f"a budget must be a Budget, got {others[0]!r}; write Budget(fraction=0.02), for example")
    own = budget or usual_budget(selector, sparse_rows == "decode", backend)
    how = Options(own, layer_budgets or {}, dense, rule, kv == "host", remainder, backend, exact)
    return Attachment(model, selector, how)


class Attachment:
    """Sparse attention on one model, until `detach`. Created by `attach`.

    Attributes:
        model: the model.
        layers: indices of its sparse layers.
        remainder: whether any of them adds the remainder of its selections.
        break_even: the context length, measured or predicted, from which a sparse step is faster than a dense one, in
            the first layer whose budget asks for it; None if no budget does.
        drafts: state of exact mode, None without it; `drafts.acceptance` counts drafted and accepted tokens.
    """

    def __init__(self, model: PreTrainedModel, selector: KeyQueryHasher | Selector | None, how: Options):
        require_attachable(model)
        if how.exact is not None:
            require_forgets(model)
        if how.backend == "flash":
            require_flash(model, how.on_host)
        self.model: PreTrainedModel = model
        self._backend: Backend = how.backend
        self._on_host = how.on_host
        self._handles: list[RemovableHandle] = []
        self._name: AttentionName | None = None
        self._batching: Batching | None = None
        self._growing = WeakSet[CacheLayerMixin]()
        self._dense: tuple[int, ...] = ()
        self._retyped: Callable[[], None] | None = None
        planned = plan_layers(model, selector, how)
        self._plans, self._ranks = planned.plans, planned.ranks
        self.break_even: int | None = planned.break_even
        self.layers: tuple[int, ...] = tuple(planned.modules)
        summing = [layer for layer, plan in self._plans.items() if plan.remainder is not None]
        self.remainder: bool = bool(summing)
        self.drafts: Drafts | None = None if planned.pace is None else Drafts(planned.pace, self.prepare, summing)
        if planned.modules:
            self._switch_on(planned.modules)
            if (reach := getattr(selector, "reach", None)) is not None:
                self._handles.append(ReachHook(planned.modules[min(planned.modules)], reach).handle)

    def _switch_on(self, modules: Mapping[int, Attention]) -> None:
        """Set the model's attention, and hook its sparse layers."""
        model = self.model
        register()
        self._config = cast(Any, text_decoder(model).config)
        dense = dense_name(model)
        name = AttentionName.of(FLASH_NAME if self._backend == "flash" else NAMES[dense], dense)
        set_attention(model, name)
        self._name = name
        self._batching = Batching(model, self._plans, name, self.drafts is not None, self._on_host, self._ranks)
        self._retyped = None if self.drafts is None else retype(model, self.drafts)
        self._dense = tuple(found.layer for found in dense_modules(model, modules))
        may_be_short = self._backend == "gather" and not self._on_host
        ways = (self._config, name), self._held, self._growing, may_be_short
        for layer, found in modules.items():
            hook = Hook(self._plans[layer], found.arguments, *ways)
            if self.drafts is not None:
                given = self._plans[layer], found.arguments, *ways[:-1]
                hook = ExactHook(*given, drafting=self.drafts.has, grows=self._grow)
            self._handles.append(found.module.register_forward_pre_hook(hook, with_kwargs=True))

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Restore the model, and turn the caches filled meanwhile into plain ones. Safe to call twice."""
        if self._batching is not None:  # first: a step in another thread must not lose its hooks
            self._batching.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._name is not None:
            self._name.live = False
            if self._retyped is not None:
                self._retyped()
            if self._config._attn_implementation == self._name:  # the caller may have set another one
                set_attention(self.model, self._name.dense)
            self._name = None
        for plan in self._plans.values():
            plan.encoder.release()
        for layer in list(self._growing):
            stop_growing(layer)

    def counts(self) -> dict[int, tuple[int, int]]:
        """Return (selected, visible) tokens by layer, summed over all sparse rows and query heads so far."""
        found = {layer: plan.tally.totals() for layer, plan in self._plans.items()}
        return {layer: (selected, visible) for layer, (selected, visible) in found.items() if visible}

    def density(self) -> dict[int, float]:
        """Return selected / visible by layer so far, with sink and recent tokens, without prefill and dense layers.

        A decode step that was dense because of `dense_below` counts as 1.
        """
        return {layer: selected / visible for layer, (selected, visible) in self.counts().items()}

    def reset_density(self) -> None:
        """Reset the counts of `counts` and `density`."""
        for plan in self._plans.values():
            plan.tally.reset()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY)

    def _grow(self, cache: Any) -> None:
        """Make the filled cache layers of dense layers grow in place, on the CPU."""
        if type(cache) is not DynamicCache:
            return
        for index in self._dense:
            held = cache.layers[index] if index < len(cache.layers) else None
            if type(held) is DynamicLayer and held.is_initialized and held.device.type == "cpu":
                grow(held, self._growing)

    def memory(self, cache: Cache) -> tuple[int, int]:
        """Return the bytes of a cache: keys and values of all layers; codes and sums of the remainder."""
        kv = codes = 0
        for layer in cache.layers:
            held = layer.memory() if isinstance(layer, CODED) else (_kv_bytes(layer), 0)
            kv, codes = kv + held[0], codes + held[1]
        return kv, codes

    def forecast(self, batch: int, tokens: int) -> Forecast:
        """Predict the memory of `batch` sequences of `tokens` tokens each, in bytes, without running anything.

        Assumes the model's dtype, a dynamic cache and a hasher of `hashtrain`; other selectors and hashers may need
        more temporary memory.

        Raises: ValueError if batch or tokens is below 1.
        """
        shape = ModelShape.of(text_decoder(self.model).config)
        mine = shape if self._ranks == 1 else shard_shape(shape, self._ranks)
        growing = self._dense if self.model.device.type == "cpu" else ()
        return forecast(self.model, mine, self._plans, batch, tokens, growing)

    def prepare(self, cache: Cache) -> Cache:
        """Make a cache carry codes before its first call. Needed only if that call is compiled.

        A static cache must be allocated first: call its `early_initialization`.
        Returns: the same cache.
        """
        for plan in self._plans.values():
            self._held(plan, cache)
        return cache

    def _held(self, plan: LayerPlan, cache: Any) -> CacheLayerMixin:
        """Return the cache's layer, carrying codes if the selector needs them."""
        held = cache_layer(cache, plan.layer)
        if getattr(held, "encoder", None) is plan.encoder:
            return held
        if self._backend == "flash" and (not isinstance(held, DynamicLayer) or is_quantised(type(held))):
            raise ValueError(f'backend="flash" needs a DynamicCache, got a layer of type {type(held).__name__}')
        if not plan.selector.needs_codes:
            return held
        if torch.compiler.is_compiling():
            raise ValueError("the first call with a cache must not be compiled; call prepare(cache) on the attachment")
        if not self._on_host:
            self._grow(cache)
            return carry_codes(held, plan.encoder)
        if type(held) not in (DynamicLayer, GrowingLayer, CodedDynamicLayer, HostLayer):
            raise ValueError(f'kv="host" needs a DynamicCache, got a layer of type {type(held).__name__}')
        return carry_codes(held, plan.encoder, HostLayer)


def _kv_bytes(layer: Any) -> int:
    return sum(x.nbytes for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None)
