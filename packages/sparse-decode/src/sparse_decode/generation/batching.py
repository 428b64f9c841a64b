"""transformers' continuous batching on an attached model: `generate_batch` and its manager.

The manager, its scheduler and its cache stay transformers' own. It gets

1. our attention, by a name that it accepts (`packed.attention`), while any manager is open (`AttentionSwitch`);
2. a cache for a model with a few more layers, whose pages in each block hold the codes of the sparse layers. Whatever
   shares, forks, offloads or frees a block does it to the codes.

What cannot work is refused before the first step: what `attach` was given when the manager is made, the layout of the
blocks when its cache is made.
"""

# Managers and configs of transformers have no types.
# pyright: reportUnknownMemberType=false, reportAttributeAccessIssue=false

import copy
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import transformers
from hashtrain import ModelShape
from hashtrain.models import text_decoder
from transformers import AttentionInterface, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from sparse_decode.attention.attend_inputs import KINDS
from sparse_decode.generation.packed import MARK, CodedBlocks, Plans, attention
from sparse_decode.model import PAGED_NAMES, AttentionName
from sparse_decode.select import HashSelector

START = "init_continuous_batching"
"""The method of a model that makes managers; `generate_batch` and the context manager call it."""
_CACHED = "_cached_continuous_batching_manager"
_METHODS = {
    "_create_batch_processor": ["self"],
    "_generation_step": ["self"],
    "_run_generation_loop": ["self"],
    "switch_to_cb_friendly_attn": ["self", "model", "auto_switch_to_flash"],
}
"""Arguments of the methods of managers that nobody documents, and that are changed or relied on here."""


class Hold:
    """A reason for the attention of steps: that a manager is being made, or that its thread is in its loop."""


class AttentionSwitch:
    """Sets the attention of an attached model: that of steps while anything holds it, else that of other calls.

    A manager holds it from when it is made until it is stopped or destroyed, or cannot make its cache; its thread holds
    it by a `Hold` until it leaves its loop. Holders are weak references: one that is garbage no longer counts.

    Args: config: of the text decoder; others, steps: the names of our attention in other calls, and in steps.
    """

    def __init__(self, config: Any, others: AttentionName, steps: AttentionName):
        self._config, self._ours = config, (others, steps)
        self._lock = threading.RLock()  # taken again where a manager becomes garbage meanwhile
        self._holders = WeakSet[Any]()
        self._ended = False

    def open(self, holder: Any) -> None:
        """Add a holder, and set the attention of steps."""
        with self._lock:
            self._holders.add(holder)
            self.settle()

    def close(self, holder: Any) -> None:
        """Remove a holder; without any, set the attention of other calls."""
        with self._lock:
            self._holders.discard(holder)
            self.settle()

    def end(self) -> None:
        """Set the attention of other calls for good."""
        with self._lock:
            self._ended = True
            self.settle()

    def settle(self) -> None:
        """Set the attention that the holders require, unless the caller has set another than ours.

        Not by transformers' method, which replaces flash attention that some models do not list.
        """
        with self._lock:
            held = [*self._holders]  # so that none of them is garbage before the attention is set
            if any(self._config._attn_implementation is name for name in self._ours):
                self._config._attn_implementation_internal = self._ours[bool(held) and not self._ended]


class Batching:
    """Continuous batching on one attached model, until `close`.

    Args: model: its method `init_continuous_batching` is replaced in this object alone; plans: its sparse layers; name:
        its attention while attached; exact, on_host: whether it is in exact mode, and whether its keys are in host
        memory; ranks: the number of tensor-parallel ranks.
    """

    def __init__(self, model: Any, plans: Plans, name: AttentionName, exact: bool, on_host: bool, ranks: int):
        self._model = model
        self._config: Any = text_decoder(model).config
        self._plans = plans
        self._elsewhere = (
            (exact, "got exact mode; attach without exact"),
            (on_host, 'got kv="host"; attach with kv="device"'),
            (ranks > 1, f"got {ranks} tensor-parallel ranks; use one process"),
        )
        self._paged = AttentionName.of(PAGED_NAMES[name.dense], name.dense)
        self.switch: AttentionSwitch = AttentionSwitch(self._config, name, self._paged)
        self._managers = WeakSet[Any]()
        self._live = hasattr(type(model), START)
        if self._live:
            for paged in PAGED_NAMES.values():
                AttentionInterface.register(paged, attention)
            setattr(model, START, self._start)

    def close(self) -> None:
        """Stop the managers that were made meanwhile, whose unfinished requests fail, and restore the model.

        Raises: what stopping a manager raises; nothing is restored then.
        """
        if not self._live:
            return
        self._live = False  # first: no thread may start another one
        try:
            for manager in list(self._managers):
                if manager.is_running():
                    manager.stop(hard_stop=True)
        except BaseException:
            self._live = True
            raise
        self._paged.live = False
        delattr(self._model, START)
        if isinstance(getattr(self._model, _CACHED, None), Managed):
            self._model.destroy_cached_continuous_batching_manager()
        self.switch.end()

    def _start(self, *given: Any, **named: Any) -> Any:
        """Make a manager: `init_continuous_batching` of an attached model, with its arguments.

        Raises: ValueError if continuous batching does not support what was attached.
        """
        _require_methods()
        self._require()
        making = Hold()
        self.switch.open(making)
        try:
            manager = getattr(type(self._model), START)(self._model, *given, **named)
            _require_plain(manager.continuous_batching_config)
            if not isinstance(manager, Managed):
                manager.__class__ = _managed(type(manager))
                manager.batching, manager.loop = self, Hold()
                self._managers.add(manager)
                weakref.finalize(manager, self.switch.settle).atexit = False
            self.switch.open(manager)
        finally:
            self.switch.close(making)
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
        finally:
            manager.model = model
        if not hasattr(made.cache, MARK):
            prompts = functools.partial(_prompts, weakref.ref(made))  # the cache must not keep what keeps the cache
            try:
                blocks = CodedBlocks(made.cache, self._plans, words, layers, prompts)
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as found:
                manager.batch_processor = None
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
    """Mixed into the class of a manager: what an attached model changes.

    Attributes: batching: the attachment's; loop: what its thread holds the attention by.
    """

    batching: Batching
    loop: Hold

    def switch_to_cb_friendly_attn(self, *given: Any, **named: Any) -> None:
        """Do nothing where a manager that was kept is used again: our attention is set already."""

    def start(self) -> None:
        """Start, with the attention of steps, also after `stop`."""
        if not self.is_running():
            self.batching.switch.open(self.loop)
        try:
            super().start()
        except BaseException:
            self.batching.switch.close(self.loop)
            raise

    def stop(self, *given: Any, **named: Any) -> None:
        """Stop, and no longer hold the attention of steps."""
        super().stop(*given, **named)  # pyright: ignore[reportUnknownVariableType]
        self.batching.switch.close(self)

    def destroy(self) -> None:
        """Destroy, and no longer hold the attention of steps, also if it was never started."""
        super().destroy()
        self.batching.switch.close(self)

    def _run_generation_loop(self) -> None:
        """Run the thread, which ends after `stop` where that does not wait."""
        try:
            super()._run_generation_loop()
        finally:
            self.batching.switch.close(self.loop)

    def _generation_step(self) -> None:
        """Run a step, and let go of what its layers shared."""
        processor: Any = self.batch_processor
        try:
            super()._generation_step()
        finally:
            if processor is not None:
                getattr(processor.cache, MARK).end_step()

    def _create_batch_processor(self) -> Any:
        """Create the cache and all that goes with it."""
        try:
            return self.batching.processor(self, super()._create_batch_processor)
        except BaseException:
            self.batching.switch.close(self)
            raise


@functools.cache
def _managed(plain: type[Any]) -> type[Any]:
    """Return the class of managers of an attached model, for a class of transformers."""
    return type(plain.__name__, (Managed, plain), {})


class _Wider:
    """A model with more full-attention layers, for the manager to make its cache for."""

    def __init__(self, model: Any, config: Any, layers: int):
        self._model = model
        self.config: Any = copy.copy(config)
        types = getattr(config, "layer_types", None)
        if types is not None:
            self.config.layer_types = [*types, *["full_attention"] * layers]
        self.config.num_hidden_layers = config.num_hidden_layers + layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def code_layers(model: PreTrainedModel, plans: Plans) -> tuple[int, int]:
    """Return how many layers have as many bytes in a block as the codes, and the 32-bit words of a code."""
    layer = min(plans)
    heads = ModelShape.of(text_decoder(model).config).at(layer)
    probe = torch.zeros(1, heads.num_kv_heads, 1, heads.head_dim, dtype=model.dtype)
    words = plans[layer].selector.encode_keys(layer, probe).shape[3]  # pyright: ignore[reportOptionalMemberAccess]
    return -(-len(plans) * 4 * words // (2 * heads.head_dim * model.dtype.itemsize)), words


def _prompts(processor: Callable[[], Any]) -> list[int]:
    """Return the prompt lengths of the requests in a processor's step; not of what is read again with the prompt."""
    states = (future.state for future in processor().inputs_and_outputs.requests_in_batch)
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
