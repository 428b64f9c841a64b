"""Attaching sparse attention to a model, and taking it off again."""

from __future__ import annotations

import inspect
from typing import Any, Literal
from weakref import WeakSet

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from sparse_decode.budget import Budget
from sparse_decode.cache import CodedLayer, Encoder, carry_codes, drop_codes
from sparse_decode.interface import KEYWORD, NAMES, Call, Plan, Tally, register
from sparse_decode.select import HashSelector, KeyQueryHasher, Selector


def attach(
    model: PreTrainedModel,
    selector: KeyQueryHasher | Selector | None,
    budget: Budget | None = None,
    *,
    dense_layers: int = 2,
    sparse_rows: Literal["decode"] | int = "decode",
    decode_rows: int = 1,
) -> Attachment:
    """Make the full-attention layers of a causal language model sparse.

    Args:
        model: any Hugging Face decoder with "sdpa" or "eager" attention; its files and weights stay as they are.
        selector: a hasher (such as `hashtrain.Hasher`), another `Selector`, or None to leave everything dense.
        budget: tokens per row; 2 % by default.
        dense_layers: the first layers, which stay dense.
        sparse_rows: "decode": prefill is dense and decode steps are sparse. An integer n: in every call the rows from
            position n of their sequence on are sparse, which scores a whole text in one forward pass as decoding
            token by token after a dense prefill of n would (n = 0: sparse everywhere), and tells prefill from decoding
            whatever the chunks when n is the length of the prompt.
        decode_rows: with "decode", a call with a past and at most this many query tokens is a decode step; raise it
            for assisted decoding, which checks several tokens at once. A last chunk of prefill of that size counts too.
    Returns: the attachment. Use it in a `with` statement, or keep it and call `detach()`.
    Raises: ValueError with one sentence if the model, its attention or the hasher cannot be used; the model is then
        unchanged.
    """
    return Attachment(model, selector, budget or Budget(), dense_layers, sparse_rows, decode_rows)


class Attachment:
    """Sparse attention on one model, until `detach`. Made by `attach`.

    Attributes:
        model: the model.
        layers: indices of its sparse layers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        selector: KeyQueryHasher | Selector | None,
        budget: Budget,
        dense_layers: int,
        sparse_rows: Literal["decode"] | int,
        decode_rows: int,
    ):
        _check_rows(dense_layers, sparse_rows, decode_rows)
        _check_model(model)
        modules: dict[int, Any] = {}
        self.model, self._tally, self._handles, self._cached = model, Tally(), [], WeakSet[CodedLayer]()
        self._dense_name: str | None = None
        if selector is not None:
            chosen = _as_selector(selector)
            chosen.require_match(model.get_decoder().config)
            modules = _sparse_modules(model, dense_layers)
            sparse_from = None if sparse_rows == "decode" else sparse_rows
            self._plan = Plan(chosen, budget, sparse_from, decode_rows, self._tally)
            self._encoders = {layer: _encoder(chosen, layer) for layer in modules}
        self.layers = tuple(modules)
        if modules:
            register()
            self._dense_name = str(model.get_decoder().config._attn_implementation)
            _set_attention(model, NAMES[self._dense_name])
            self._handles = [m.register_forward_pre_hook(self._hook, with_kwargs=True) for m in modules.values()]

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Make the model what it was before, and the caches filled meanwhile plain ones. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._dense_name is not None:
            _set_attention(self.model, self._dense_name)
            self._dense_name = None
        for layer in list(self._cached):
            drop_codes(layer)
        self._cached.clear()

    def counts(self) -> dict[int, tuple[int, int]]:
        """Return tokens selected and visible by layer, over all sparse rows and index sets so far."""
        return dict(sorted(self._tally.counts.items()))

    def density(self) -> dict[int, float]:
        """Return selected / visible by layer so far, sink and recent included; dense rows and layers do not count."""
        return {layer: selected / visible for layer, (selected, visible) in self.counts().items() if visible}

    def reset_density(self) -> None:
        """Start counting anew."""
        self._tally.reset()

    def _hook(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hand the attention function its call; make the layer's cache carry codes at first sight."""
        layer, cache = module.layer_idx, kwargs.get("past_key_values")
        coded = None if cache is None else self._coded(cache, layer)
        return args, {**kwargs, KEYWORD: Call(self._plan, layer, coded)}

    def _coded(self, cache: Any, layer: int) -> CodedLayer | None:
        """Return the cache's layer, carrying codes; None if the selector needs none."""
        held = _cache_layer(cache, layer)
        if not self._plan.selector.needs_codes:
            return None
        coded = carry_codes(held, self._encoders[layer])
        self._cached.add(coded)
        return coded


def _check_rows(dense_layers: int, sparse_rows: object, decode_rows: int) -> None:
    if not isinstance(dense_layers, int) or dense_layers < 0:
        raise ValueError(f"dense_layers must be an integer of 0 or more, got {dense_layers!r}")
    if sparse_rows != "decode" and (not isinstance(sparse_rows, int) or sparse_rows < 0):
        raise ValueError(f'sparse_rows must be "decode" or an integer of 0 or more, got {sparse_rows!r}')
    if not isinstance(decode_rows, int) or decode_rows < 1:
        raise ValueError(f"decode_rows must be an integer of 1 or more, got {decode_rows!r}")


def _check_model(model: PreTrainedModel) -> None:
    if model.config.is_encoder_decoder:
        raise ValueError("a decoder-only model is needed, got an encoder-decoder; its cross attention cannot be sparse")
    config = model.get_decoder().config
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"a model with one key per KV head is needed, got {config.model_type}, which keeps compressed keys "
            "(multi-head latent attention)"
        )
    name = config._attn_implementation
    if name in NAMES.values():
        raise ValueError(
            "sparse attention is already attached to this model, or to another that shares its config object; "
            "call detach() on that attachment first"
        )
    if name not in NAMES:
        raise ValueError(
            f'attention must be "sdpa" or "eager", got "{name}"; call model.set_attn_implementation("sdpa") first'
        )


def _as_selector(selector: KeyQueryHasher | Selector) -> Selector:
    if hasattr(selector, "select"):
        return selector  # pyright: ignore[reportReturnType]
    if hasattr(selector, "encode_queries"):
        return HashSelector(selector)  # pyright: ignore[reportArgumentType]
    raise ValueError(
        f"a hasher with encode_keys and encode_queries, or a Selector, is needed, got {type(selector).__name__}"
    )


def _encoder(selector: Selector, layer: int) -> Encoder:
    return lambda k: selector.encode_keys(layer, k)


def _sparse_modules(model: PreTrainedModel, dense_layers: int) -> dict[int, Any]:
    """Find the attention modules to make sparse: full attention, from layer `dense_layers` on."""
    decoder = model.get_decoder()
    attention: list[Any] = [m for m in decoder.modules() if _is_attention(m)]
    modules = {m.layer_idx: m for m in attention}
    full = {layer: m for layer, m in modules.items() if _is_full(decoder.config, layer)}
    if not full:
        raise ValueError(
            f"a model with full-attention layers is needed, got {len(modules)} attention layers of "
            f"{type(model).__name__}, none of which sees the whole context"
        )
    chosen = {layer: m for layer, m in sorted(full.items()) if layer >= dense_layers}
    if not chosen:
        raise ValueError(
            f"dense_layers must leave a full-attention layer, of which the last is {max(full)}, got {dense_layers}"
        )
    return chosen


def _is_attention(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "o_proj") and (
        "past_key_values" in inspect.signature(module.forward).parameters
    )  # fmt: skip


def _is_full(config: Any, layer: int) -> bool:
    types = getattr(config, "layer_types", None)
    if types is not None:
        return types[layer] == "full_attention"
    return getattr(config, "sliding_window", None) is None


def _cache_layer(cache: Any, layer: int) -> DynamicLayer:
    """Return one layer of a cache, made if the cache makes its layers lazily."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values must be a transformers Cache, got {type(cache).__name__}; use DynamicCache()"
        )
    if getattr(cache, "offloading", False):
        raise ValueError("a cache that offloads its layers is not supported yet; use DynamicCache()")
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= layer:
            cache.layers.append(cache.layer_class_to_replicate())
    held = cache.layers[layer]
    if type(held) not in (DynamicLayer, CodedLayer):
        raise ValueError(
            f"cache layers of type DynamicLayer are needed, got {type(held).__name__} in layer {layer}; "
            "use DynamicCache(), the default of generate"
        )
    return held  # pyright: ignore[reportReturnType]


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of the text decoder alone: a vision tower keeps its own."""
    config, decoder = model.config, model.get_decoder().config
    mine = [key for key in config.sub_configs if getattr(config, key) is decoder]
    model.set_attn_implementation({mine[0]: name} if mine else name)
