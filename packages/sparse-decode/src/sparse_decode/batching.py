"""transformers' continuous batching on an attached model: `generate_batch` and its manager.

The manager, its scheduler and its cache stay transformers' own. It gets

1. our attention, by a name that it accepts (`packed.attention`), while the manager is open;
2. a cache for a model with a few more layers, whose pages in each block hold the codes of the sparse layers. Whatever
   shares, forks, offloads or frees a block does it to the codes.

What cannot work is refused before the first step: what `attach` was given when the manager is made, the layout of the
blocks when its cache is made.
"""

# Managers and configs of transformers have no types.
# pyright: reportUnknownMemberType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
import transformers
from hashtrain import ModelShape
from hashtrain.models import text_decoder
from transformers import AttentionInterface, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from sparse_decode.attend import KINDS
from sparse_decode.model import PAGED_NAMES, AttentionName
from sparse_decode.packed import MARK, CodedBlocks, attention
from sparse_decode.plan import LayerPlan
from sparse_decode.select import HashSelector

START = "init_continuous_batching"
"""The method of a model that makes managers; `generate_batch` and the context manager call it."""
_CACHED = "_cached_continuous_batching_manager"
_METHODS = {
    "_create_batch_processor": ["self"],
    "switch_to_cb_friendly_attn": ["self", "model", "auto_switch_to_flash"],
}
"""Arguments of the methods of managers that nobody documents, and that are changed or relied on here."""


class Batching:
    """Continuous batching on one attached model, until `close`.

    Args:
        model: the model; its method `init_continuous_batching` is replaced in this object alone.
        plans: its sparse layers; name: its attention while attached.
        exact, on_host, ranks: whether it is in exact mode, whether its keys are in host memory, and the number of
            tensor-parallel ranks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plans: Mapping[int, LayerPlan],
        name: AttentionName,
        exact: bool,
        on_host: bool,
        ranks: int,
    ):
        self._model: Any = model
        self._config: Any = text_decoder(model).config
        self._plans, self._name = plans, name
        self._elsewhere = (
            (exact, "got exact mode; attach without exact"),
            (on_host, 'got kv="host"; attach with kv="device"'),
            (ranks > 1, f"got {ranks} tensor-parallel ranks; use one process"),
        )
        self._paged = AttentionName.of(PAGED_NAMES[name.dense], name.dense)
        self._managers = WeakSet[Any]()
        self._live = hasattr(type(model), START)
        if self._live:
            for paged in PAGED_NAMES.values():
                AttentionInterface.register(paged, attention)
            setattr(model, START, self._start)

    def close(self) -> None:
        """Stop the managers that were made meanwhile, whose unfinished requests fail, and restore the model."""
        if not self._live:
            return
        self._live = self._paged.live = False
        delattr(self._model, START)
        for manager in list(self._managers):
            if manager.is_running():
                manager.stop(hard_stop=True)
        if isinstance(getattr(self._model, _CACHED, None), Managed):
            self._model.destroy_cached_continuous_batching_manager()
        self.switch(False)

    def switch(self, on: bool) -> None:
        """Set the attention of steps of continuous batching, or that of other calls.

        Not by transformers' method, which replaces flash attention that some models do not list.
        """
        ours = self._name, self._paged
        if any(self._config._attn_implementation is name for name in ours):
            self._config._attn_implementation_internal = ours[on]

    def _start(self, *given: Any, **named: Any) -> Any:
        """Make a manager: `init_continuous_batching` of an attached model, with its arguments.

        Raises: ValueError if continuous batching does not support what was attached.
        """
        _require_methods()
        self._require()
        self.switch(True)
        try:
            manager = getattr(type(self._model), START)(self._model, *given, **named)
            _require_plain(manager.continuous_batching_config)
        except BaseException:
            self.switch(False)
            raise
        if not isinstance(manager, Managed):
            plain = type(manager)
            manager.__class__ = type(plain.__name__, (Managed, plain), {"batching": self})
            self._managers.add(manager)
        return manager

    def processor(self, manager: Any, create: Callable[[], Any]) -> Any:
        """Create a manager's processor of batches, whose cache has room for codes, and knows where they are.

        Raises: ValueError if the model is detached, or the cache of this version of transformers has another layout.
        """
        if not self._live:
            raise ValueError(
                "this manager was made while sparse attention was attached; make another one after detach()"
            )
        layers, words = code_layers(self._model, self._plans)
        model, manager.model = manager.model, _Wider(self._model, self._config, layers)
        try:
            made = create()
        except BaseException:
            self.switch(False)
            raise
        finally:
            manager.model = model
        if not hasattr(made.cache, MARK):
            try:
                blocks = CodedBlocks(made.cache, self._plans, words, layers, functools.partial(_prompts, made))
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as found:
                manager.batch_processor = None
                self.switch(False)
                raise ValueError(
                    f"continuous batching of transformers {transformers.__version__} stores keys in another way than "
                    f"expected ({found}); call detach() first, or use version 5.23"
                ) from found
            setattr(made.cache, MARK, blocks)
        return made

    def _require(self) -> None:
        """Raise ValueError if continuous batching does not support what was attached."""
        plans = self._plans.values()
        first = next(iter(plans))
        selectors = [plan.selector for plan in plans]
        hashed = all(isinstance(x, HashSelector) and not x.per_query_head for x in selectors)
        found = (
            *self._elsewhere,
            (first.backend != "gather", 'got backend="flash"; attach with backend="gather"'),
            (any(plan.remainder is not None for plan in plans), "got a remainder; attach with remainder=False"),
            (not hashed, f"got {type(first.selector).__name__}, not a hasher with codes per KV head; attach another"),
            (any(plan.budget.shortlist is not None for plan in plans), "got a budget with a shortlist; omit it"),
            (any(plan.budget.of != "visible" for plan in plans), 'got a budget with of="length"; omit it'),
            (first.rule.max_decode_rows > 1, f"got max_decode_rows={first.rule.max_decode_rows}; omit it"),
            (bool(ModelShape.of(self._config).per_layer), "got layers with different heads; call detach() first"),
            (self._config is not self._model.config, "got a model of more than text; call detach() first"),
            (self._model.device.type != "cpu", f"got a model on {self._model.device}; move it to the CPU"),
            (self._model.dtype not in KINDS, f"got {self._model.dtype}; load the model in one of {[*KINDS]}"),
            (
                hasattr(self._model, _CACHED) and not isinstance(getattr(self._model, _CACHED), Managed),
                "got a manager that was kept from before; call destroy_cached_continuous_batching_manager() first",
            ),
        )
        for wrong, what in found:
            if wrong:
                raise ValueError(f"continuous batching does not support all that sparse attention does: {what}")


class Managed:
    """Mixed into the class of a manager: what an attached model changes. `batching` is the attachment's."""

    batching: Batching

    def switch_to_cb_friendly_attn(self, *given: Any, **named: Any) -> None:
        """Do nothing where a manager that was kept is used again: our attention is set already."""

    def stop(self, *given: Any, **named: Any) -> None:
        """Stop, and set the attention of other calls again."""
        try:
            super().stop(*given, **named)  # pyright: ignore[reportUnknownVariableType]
        finally:
            self.batching.switch(False)

    def _create_batch_processor(self) -> Any:
        """Create the cache and all that goes with it."""
        return self.batching.processor(self, super()._create_batch_processor)


class _Wider:
    """A model as the manager's cache shall see it: with more full-attention layers."""

    def __init__(self, model: Any, config: Any, layers: int):
        self._model = model
        self.config: Any = copy.copy(config)
        types = getattr(config, "layer_types", None)
        if types is not None:
            self.config.layer_types = [*types, *["full_attention"] * layers]
        self.config.num_hidden_layers = config.num_hidden_layers + layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def code_layers(model: PreTrainedModel, plans: Mapping[int, LayerPlan]) -> tuple[int, int]:
    """Return how many layers have as many bytes in a block as the codes, and the 32-bit words of a code."""
    layer = min(plans)
    heads = ModelShape.of(text_decoder(model).config).at(layer)
    probe = torch.zeros(1, heads.num_kv_heads, 1, heads.head_dim, dtype=model.dtype)
    words = plans[layer].selector.encode_keys(layer, probe).shape[3]  # pyright: ignore[reportOptionalMemberAccess]
    return -(-len(plans) * 4 * words // (2 * heads.head_dim * model.dtype.itemsize)), words


def _prompts(processor: Any) -> list[int]:
    """Return the prompt lengths of the requests in a processor's step; not of what is read again with the prompt."""
    states = (future.state for future in processor.inputs_and_outputs.requests_in_batch)
    return [state._true_initial_tokens or len(state.initial_tokens) for state in states]


def _require_methods() -> None:
    """Raise ValueError if managers of this version of transformers have other methods."""
    for name, arguments in _METHODS.items():
        method = getattr(ContinuousBatchingManager, name, None)
        if method is None or list(inspect.signature(method).parameters) != arguments:
            raise ValueError(
                f"continuous batching of transformers {transformers.__version__} works in another way than expected "
                f"({name}); call detach() first, or use version 5.23"
            )


def _require_plain(config: Any) -> None:
    """Raise ValueError if a manager's config asks for what does not work."""
    compiled = config.varlen_compile_config is not None or config.decode_compile_config is not None
    if compiled or config.use_async_batching:
        raise ValueError(
            "continuous batching with sparse attention runs neither compiled nor ahead of its results, got "
            f"{'a compile config' if compiled else 'use_async_batching'}; omit it"
        )
