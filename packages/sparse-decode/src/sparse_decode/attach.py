"""Attaching sparse attention to a model, and taking it off again."""

# Configs of transformers have no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, cast
from weakref import WeakSet

import torch
from hashtrain import ModelShape
from hashtrain.models import text_decoder
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, EncoderDecoderCache

from sparse_decode import flash
from sparse_decode.attend import require_values
from sparse_decode.blocks import RowRule
from sparse_decode.break_even import break_even, predicted
from sparse_decode.budget import Budget
from sparse_decode.cache import CODED, CodedDynamicLayer, carry_codes, coded_type, is_quantised
from sparse_decode.exact import Drafts, retype
from sparse_decode.exact_refusals import require_exact, require_forgets
from sparse_decode.forecast import Forecast, forecast
from sparse_decode.growing import GrowingLayer, grow, stop_growing
from sparse_decode.hooks import NO_COPY, ExactHook, Hook
from sparse_decode.interface import FLASH_NAME, NAMES, AttentionName, register
from sparse_decode.model import (
    Attention,
    dense_modules,
    dense_name,
    require_all_full,
    require_attachable,
    require_kernels,
    require_own_keys,
    set_attention,
    sparse_modules,
)
from sparse_decode.offload import HostLayer
from sparse_decode.pace import Costs, Pace
from sparse_decode.parallel import head_shard, shard, shard_shape
from sparse_decode.plan import Kernel, LayerPlan
from sparse_decode.positions import Sights
from sparse_decode.select import AttendingSelector, HashSelector, KeyQueryHasher, Selector


def attach(
    model: PreTrainedModel,
    selector: KeyQueryHasher | Selector | None,
    budget: Budget | None = None,
    *,
    layer_budgets: Mapping[int, Budget] | None = None,
    dense_layers: int | Collection[int] | None = None,
    sparse_rows: Literal["decode"] | int = "decode",
    decode_rows: int = 1,
    kv: Literal["device", "host"] = "device",
    remainder: bool = True,
    kernel: Kernel = "gather",
    exact: int | None = None,
) -> Attachment:
    """Make the full-attention layers of a causal language model sparse.

    Args:
        model: any Hugging Face decoder with "sdpa" or "eager" attention; its files and weights stay as they are.
        selector: a hasher (such as `hashtrain.Hasher`), another `Selector`, or None to leave everything dense.
        budget: tokens per row. By default 2 %, and in decode steps all below the context from which on a sparse step is
            predicted to be faster (`dense_below="predicted"`), so that attaching slows no step.
        layer_budgets: budgets of single layers, which they have instead.
        dense_layers: which layers stay dense: so many of the first, or their indices; by default those that the hasher
            names, because training measured that they cost too much, and none with another selector.
        sparse_rows: "decode": prefill is dense and decode steps are sparse. An integer n: in every call the rows from
            position n of their sequence on are sparse, which scores a whole text in one forward pass as decoding
            token by token after a dense prefill of n would (n = 0: sparse everywhere), and tells prefill from decoding
            whatever the chunks when n is the length of the prompt.
        decode_rows: with "decode", a call with a past and at most this many query tokens is a decode step; raise it
            for assisted decoding, which checks several tokens at once. A last chunk of prefill of that size counts too.
        kv: where the sparse layers of dynamic caches keep keys and values. "host": in host memory, pinned if there is
            a GPU; codes stay on the device, and a sparse step brings over only the rows that it selected.
        remainder: add what each selection leaves out, as one token of mean value and estimated weight (eq. 15, 16),
            if the hasher has been calibrated for it, as those of `hashtrain` are; `Attachment.remainder` says so. A
            mask must then go on showing and hiding what it showed and hid: a decode step on CUDA does not look at one
            that changed for earlier tokens, and the layer's output is NaN in that row for as long as the cache is used.
            On the CPU the sums are made anew; a compiled step there is refused.
        kernel: what attends. "gather": our own kernels, and for dense calls what the model uses. "flash": flash-attn
            (extra `sparse-decode[flash]`) for dense calls and over rows that torch gathers, as in the paper: on CUDA
            in 16-bit types, without padding, remainder, learned sinks, sliding layers, static caches.
        exact: `generate` makes what the model makes without us, greedy token for token and samples in distribution: at
            most so many tokens (up to 15) are drafted by sparse steps, then checked by one dense pass. Everything else
            the model is called for is dense. Fewer are drafted, down to none, where that is predicted to pay more; with
            a number as the budget's `dense_below` one at least from that context on. Of one sequence at a time.
    Returns: the attachment. Use it in a `with` statement, or keep it and call `detach()`. Its `forecast(batch, tokens)`
        says beforehand what memory a run takes, and `memory(cache)` what a cache has taken.
    Raises: ValueError with one sentence if the model, its attention or the hasher cannot be used; the model is then
        unchanged.
    """
    _check_rows(dense_layers, sparse_rows, decode_rows)
    if kv not in ("device", "host"):
        raise ValueError(f'kv must be "device" or "host", got {kv!r}')
    if kernel not in ("gather", "flash"):
        raise ValueError(f'kernel must be "gather" or "flash", got {kernel!r}')
    if exact is not None:
        require_exact(exact, selector, sparse_rows, decode_rows, kv, kernel)
    rule = RowRule(None if sparse_rows == "decode" else sparse_rows, decode_rows)
    how = kv == "host", remainder, kernel
    dense = _dense_layers(selector, dense_layers)
    own = Budget(dense_below="predicted" if sparse_rows == "decode" else 0)
    return Attachment(model, selector, budget or own, layer_budgets or {}, dense, rule, *how, exact)


class Attachment:
    """Sparse attention on one model, until `detach`. Made by `attach`.

    Attributes:
        model: the model.
        layers: indices of its sparse layers.
        remainder: whether any of them adds what its selections leave out.
        break_even: the context from which on a sparse step was measured, or is predicted, to be faster than a dense
            one, in the first layer whose budget asks for it; None if none does.
        drafts: of exact mode, None without it: its `acceptance` says how many tokens were drafted, and accepted.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        selector: KeyQueryHasher | Selector | None,
        budget: Budget,
        layer_budgets: Mapping[int, Budget],
        dense_layers: Collection[int],
        rule: RowRule,
        on_host: bool,
        remainder: bool,
        kernel: Kernel = "gather",
        exact: int | None = None,
    ):
        require_attachable(model)
        if exact is not None:
            require_forgets(model)
        self._kernel: Kernel = kernel
        if kernel == "flash":
            shape = ModelShape.of(text_decoder(model).config)
            flash.require(model.device, model.dtype, [shape.at(i).head_dim for i in range(shape.num_layers)])
            require_all_full(model)
            if on_host:
                raise ValueError('kernel="flash" gathers on the model\'s device; use kv="device"')
        modules: dict[int, Attention] = {}
        self.model: PreTrainedModel = model
        self._handles: list[RemovableHandle] = []
        self._plans: dict[int, LayerPlan] = {}
        self._name: AttentionName | None = None
        self.break_even: int | None = None
        self._on_host = on_host
        self._ranks = 1
        self._growing = WeakSet[CacheLayerMixin]()
        self._dense: tuple[int, ...] = ()
        self.drafts: Drafts | None = None
        self._retyped: Callable[[], None] | None = None
        pace = None
        if selector is not None:
            chosen = _as_selector(selector)
            chosen.require_match(text_decoder(model).config)
            if on_host and not chosen.needs_codes:
                raise ValueError(
                    f"keys and values can be on the host only for a selector that works on codes, got "
                    f'{type(chosen).__name__}; use kv="device"'
                )
            if kernel == "flash" and isinstance(chosen, AttendingSelector):
                raise ValueError(
                    f"a selector with an attention of its own uses no kernel, got {type(chosen).__name__}; use "
                    'kernel="gather"'
                )
            modules = sparse_modules(model, dense_layers)
            shape = ModelShape.of(text_decoder(model).config)
            if kernel == "gather" and not isinstance(chosen, AttendingSelector):
                require_kernels(model, modules, shape, getattr(chosen, "per_query_head", False))
            if on_host:
                require_own_keys(model)
            rank, size = head_shard(next(iter(modules.values())).module, shape.at(min(modules)))
            chosen, self._ranks = chosen if size == 1 else shard(chosen, rank, size), size
            if strangers := sorted(set(layer_budgets) - set(modules)):
                raise ValueError(f"layer_budgets must name sparse layers, {sorted(modules)}, got {strangers}")
            budgets = {layer: layer_budgets.get(layer, budget) for layer in modules}
            _require_values(budgets.values(), kernel, chosen, model.device)

            def heads_of(layer: int) -> ModelShape:
                return shape.at(layer) if size == 1 else shard_shape(shape.at(layer), size)

            stops = any(isinstance(found.dense_below, str) for found in budgets.values())
            budgets = self._settled(budgets, modules, heads_of, chosen)
            if exact is not None:
                foreseen = model.device.type == "cpu" and chosen.needs_codes
                heads = [heads_of(layer) for layer in range(shape.num_layers)]
                costs = Costs.predicted(model, budgets, heads) if foreseen else None
                below = min(cast(int, found.dense_below) for found in budgets.values())
                pace = functools.partial(Pace, exact, costs, stops, below)
            coefficients, sights = getattr(chosen, "remainder", None) if remainder else None, Sights()
            for layer, found in budgets.items():
                left_out = None if coefficients is None else coefficients(layer)
                if left_out is not None and isinstance(chosen, AttendingSelector):
                    raise ValueError(
                        "the remainder is fitted to softmax attention over a selection, got "
                        f"{type(chosen).__name__}, which has an attention of its own; attach with remainder=False"
                    )
                if left_out is not None and kernel == "flash":
                    raise ValueError(
                        'kernel="flash" does not say what the remainder needs; attach with remainder=False, or use '
                        'kernel="gather"'
                    )
                self._plans[layer] = LayerPlan(
                    layer,
                    chosen,
                    found,
                    rule,
                    left_out,
                    kernel,
                    sights,
                    _device_of(modules[layer].module),
                )
        summing = [layer for layer, plan in self._plans.items() if plan.remainder is not None]
        self.remainder: bool = bool(summing)
        if pace is not None:
            self.drafts = Drafts(pace, self.prepare, summing)
        self.layers: tuple[int, ...] = tuple(modules)
        if modules:
            register()
            self._config = cast(Any, text_decoder(model).config)
            dense = dense_name(model)
            name = AttentionName.of(FLASH_NAME if kernel == "flash" else NAMES[dense], dense)
            set_attention(model, name)
            self._name = name
            self._retyped = None if self.drafts is None else retype(model, self.drafts)
            self._dense = tuple(found.layer for found in dense_modules(model, modules))
            may_be_short = kernel == "gather" and not on_host
            ways = (self._config, name), self._held, self._growing, may_be_short
            for layer, found in modules.items():
                hook = Hook(self._plans[layer], found.arguments, *ways)
                if self.drafts is not None:
                    hook = ExactHook(self._plans[layer], found.arguments, *ways[:-1], self.drafts.has, self._grow)
                self._handles.append(found.module.register_forward_pre_hook(hook, with_kwargs=True))

    def _settled(
        self,
        budgets: dict[int, Budget],
        modules: Mapping[int, Attention],
        heads: Callable[[int], ModelShape],
        selector: Selector,
    ) -> dict[int, Budget]:
        """Put numbers in place of break-evens that are to be measured, once for all layers, or predicted."""
        model, found = self.model, dict(budgets)
        measured = [layer for layer, budget in budgets.items() if budget.dense_below == "measured"]
        if measured:
            layer = measured[0]
            facts = selector, budgets[layer], model.dtype, model.device, self._kernel
            self.break_even = break_even(modules[layer].module, layer, heads(layer), *facts)
        # What a prediction counts are a CPU's bytes of codes, keys and values.
        foreseen = model.device.type == "cpu" and selector.needs_codes and not self._on_host
        for layer, budget in budgets.items():
            if budget.dense_below == "measured":
                found[layer] = replace(budget, dense_below=self.break_even or 0)
            elif budget.dense_below == "predicted":
                below = predicted(heads(layer), budget, model.dtype) if foreseen else 0
                found[layer] = replace(budget, dense_below=below)
                self.break_even = self.break_even or below or None
        return found

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Make the model what it was before, and the caches filled meanwhile plain ones. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._name is not None:
            self._name.live = False
            if self._retyped is not None:
                self._retyped()
            if self._config._attn_implementation == self._name:  # somebody may have set another one
                set_attention(self.model, self._name.dense)
            self._name = None
        for plan in self._plans.values():
            plan.encoder.release()
        for layer in list(self._growing):
            stop_growing(layer)

    def counts(self) -> dict[int, tuple[int, int]]:
        """Return tokens selected and visible by layer, over all sparse rows and query heads so far."""
        found = {layer: plan.tally.totals() for layer, plan in self._plans.items()}
        return {layer: (selected, visible) for layer, (selected, visible) in found.items() if visible}

    def density(self) -> dict[int, float]:
        """Return selected / visible by layer so far, sink and recent included.

        Prefill and dense layers do not count; a decode step that was dense because of `dense_below` counts as 1.
        """
        return {layer: selected / visible for layer, (selected, visible) in self.counts().items()}

    def reset_density(self) -> None:
        """Start counting anew."""
        for plan in self._plans.values():
            plan.tally.reset()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY)

    def _grow(self, cache: Any) -> None:
        """Let the layers that stay dense grow in place on the CPU, where the cache has filled them."""
        if type(cache) is not DynamicCache:
            return
        for index in self._dense:
            held = cache.layers[index] if index < len(cache.layers) else None
            if type(held) is DynamicLayer and held.is_initialized and held.device.type == "cpu":
                grow(held, self._growing)

    def memory(self, cache: Cache) -> tuple[int, int]:
        """Return bytes of a cache's keys and values, in all layers, and of its codes and the sums of its remainder."""
        kv = codes = 0
        for layer in cache.layers:
            held = layer.memory() if isinstance(layer, CODED) else (_kv_bytes(layer), 0)
            kv, codes = kv + held[0], codes + held[1]
        return kv, codes

    def forecast(self, batch: int, tokens: int) -> Forecast:
        """Return the bytes that `batch` sequences of `tokens` tokens each will take, before anything is run.

        For the model's own type, a dynamic cache, and a selector that works on codes: another one, and hashers other
        than those of `hashtrain`, have temporaries of their own.

        Raises: ValueError if batch or tokens is below 1.
        """
        shape = ModelShape.of(text_decoder(self.model).config)
        mine = shape if self._ranks == 1 else shard_shape(shape, self._ranks)
        growing = self._dense if self.model.device.type == "cpu" else ()
        return forecast(self.model, mine, self._plans, batch, tokens, growing)

    def prepare(self, cache: Cache) -> Cache:
        """Make a cache carry codes before a model sees it: needed only if its first call is a compiled one.

        A static cache must also have its memory by then: call its `early_initialization` first.
        Returns: the same cache.
        """
        for plan in self._plans.values():
            self._held(plan, cache)
        return cache

    def _held(self, plan: LayerPlan, cache: Any) -> CacheLayerMixin:
        """Return the cache's layer, carrying codes if the selector needs them."""
        held = _cache_layer(cache, plan.layer)
        if getattr(held, "encoder", None) is plan.encoder:
            return held
        if self._kernel == "flash" and (not isinstance(held, DynamicLayer) or is_quantised(type(held))):
            raise ValueError(f'kernel="flash" needs a DynamicCache, got a layer of type {type(held).__name__}')
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


def _require_values(budgets: Iterable[Budget], kernel: Kernel, selector: Selector, device: torch.device) -> None:
    """Raise ValueError if a budget leaves out values and what attends cannot."""
    share = min(budget.values for budget in budgets)
    require_values(share, device)
    if share < 1 and (kernel == "flash" or isinstance(selector, AttendingSelector)):
        by = 'kernel="flash"' if kernel == "flash" else type(selector).__name__
        raise ValueError(f"values below 1 needs the attention of our own kernels, got {share} and {by}; give 1")


def _device_of(module: Any) -> torch.device:
    """Return where a layer works; the CPU for one that is brought there only when called."""
    tensors: Iterator[Tensor] = itertools.chain(module.parameters(), module.buffers())  # quantised weights are buffers
    device = next((x.device for x in tensors), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _dense_layers(selector: object, given: int | Collection[int] | None) -> Collection[int]:
    """Return the indices of the layers that stay dense."""
    if given is None:
        return getattr(selector, "dense_layers", ())
    return range(given) if isinstance(given, int) else given


def _check_rows(dense_layers: object, sparse_rows: object, decode_rows: object) -> None:
    given = cast("Collection[object]", dense_layers) if isinstance(dense_layers, Collection) else [dense_layers or 0]
    if any(not isinstance(layer, int) or layer < 0 for layer in given):
        raise ValueError(f"dense_layers must be an integer of 0 or more, or a set of them, got {dense_layers!r}")
    if sparse_rows != "decode" and (not isinstance(sparse_rows, int) or sparse_rows < 0):
        raise ValueError(f'sparse_rows must be "decode" or an integer of 0 or more, got {sparse_rows!r}')
    if not isinstance(decode_rows, int) or decode_rows < 1:
        raise ValueError(f"decode_rows must be an integer of 1 or more, got {decode_rows!r}")


def _as_selector(selector: KeyQueryHasher | Selector) -> Selector:
    if hasattr(selector, "select"):
        return selector  # pyright: ignore[reportReturnType]
    if hasattr(selector, "encode_queries"):
        return HashSelector(selector)  # pyright: ignore[reportArgumentType]
    raise ValueError(
        f"a hasher with encode_keys and encode_queries, or a Selector, is needed, got {type(selector).__name__}"
    )


def _kv_bytes(layer: Any) -> int:
    return sum(x.nbytes for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None)


def _cache_layer(cache: Any, layer: int) -> CacheLayerMixin:
    """Return one layer of a cache, made if the cache makes its layers lazily."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values must be a transformers Cache, got {type(cache).__name__}; use DynamicCache()"
        )
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if getattr(cache, "offloading", False):
        raise ValueError("a cache that offloads its layers is not supported yet; use DynamicCache()")
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= layer:
            cache.layers.append(cache.layer_class_to_replicate())
    held = cache.layers[layer]
    if not hasattr(held, "encoder") and coded_type(cast(type, type(held))) is None:
        raise ValueError(
            f"cache layers of type DynamicLayer, StaticLayer, a hybrid or a quantised one are needed, got "
            f"{type(held).__name__} in layer {layer}; use DynamicCache(config=model.config), the default of generate"
        )
    return cast(CacheLayerMixin, held)
