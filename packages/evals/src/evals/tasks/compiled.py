"""Decode steps under torch.compile over a static cache, like those of `generate(cache_implementation="static")`."""

import copy
import importlib.util
import itertools
import os
import shutil
from typing import cast

from sparse_decode import Attachment, Budget, Selector, attach
from torch import Tensor
from transformers import Cache, CompileConfig, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import CacheLayerMixin

from evals.speed import COMPILED

BACKEND = "inductor"  # the default of Hugging Face


def require_compiler(methods: tuple[str, ...], device: str) -> None:
    """Raise ValueError if a method needs torch.compile and its compiler for the device is missing."""
    named = [name for name in methods if name in COMPILED]
    if not named or BACKEND != "inductor":
        return
    remedy = f"or leave {' and '.join(named)} out of --methods"
    if device.startswith("cuda"):
        if importlib.util.find_spec("triton") is None:
            raise ValueError(f"torch.compile needs triton on {device}, found none; install it, {remedy}")
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        need = f"torch.compile needs a C++ compiler on {device}, found no {compiler} on PATH"
        raise ValueError(f"{need}; install g++, set CXX, {remedy}")


class CompiledSteps:
    """A copy of a model that shares its weights, with a static cache and a compiled call.

    The call must compile to one graph: a graph break is an error, not a slower time.

    Args:
        model: the model whose weights to share; it is not changed.
        filled: a cache of n tokens to copy.
        room: further tokens: the most that can be decoded before `rewind`.
        selector: makes steps sparse; None is dense attention, Hugging Face's "sdpa".

    Attributes:
        cache: the static cache; attachment: None if dense.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        filled: DynamicCache,
        room: int,
        selector: Selector | None,
        budget: Budget,
        dense_layers: int,
    ):
        shared = itertools.chain(model.parameters(), model.buffers())
        self._model = copy.deepcopy(model, {id(x): x for x in shared})
        self._model.set_attn_implementation("sdpa")
        self.attachment: Attachment | None = None
        if selector is not None:
            self.attachment = attach(self._model, selector, budget, dense_layers=dense_layers)
        self._n = filled.get_seq_length()
        self.cache: StaticCache = static_copy(model, filled, self._n + room)
        if self.attachment is not None:
            self.attachment.prepare(self.cache)
        self._call = self._model.get_compiled_call(CompileConfig(fullgraph=True, backend=BACKEND))

    def step(self, token: Tensor) -> Tensor:
        """Decode one token, int64 [B, 1]; return logits [B, 1, V]."""
        return self._call(token, past_key_values=self.cache, use_cache=True).logits

    def rewind(self) -> None:
        """Drop the decoded tokens: they stay beyond the cache's length, where nothing attends to them."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self._n)  # pyright: ignore[reportAttributeAccessIssue]

    def memory(self) -> tuple[int, int]:
        """Return the bytes of keys and values, including the static cache's room, and of codes."""
        if self.attachment is not None:
            return self.attachment.memory(self.cache)
        return bytes_of(self.cache), 0


def static_copy(model: PreTrainedModel, filled: DynamicCache, length: int) -> StaticCache:
    """Copy a cache into a static one with room for `length` tokens."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    for source, target in zip(layers_of(filled), layers_of(cache), strict=True):
        if source.keys is None or source.values is None:
            raise ValueError("expected a filled cache, got an empty layer")
        target.update(source.keys, source.values)
    return cache


def layers_of(cache: Cache) -> list[CacheLayerMixin]:
    """Return a cache's layers, typed as layers with keys and values: every layer of our models has attention."""
    return cast(list[CacheLayerMixin], cache.layers)


def bytes_of(cache: Cache) -> int:
    """Return the bytes of a cache's keys and values."""
    return sum(x.nbytes for layer in layers_of(cache) for x in (layer.keys, layer.values) if x is not None)
