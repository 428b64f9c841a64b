"""A warning, once an attachment, when a context is longer than its hasher was made for."""

import warnings
from typing import Any

import torch
from hashtrain.data.offsets import beyond
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from sparse_decode.model import CACHE_NAMES, Attention


class ReachHook:
    """The forward pre-hook of the first sparse layer, which compares each call's context with the hasher's reach.

    It reads sizes alone, never a tensor's values, does nothing in compiled graphs, and removes itself when it has
    warned. A static cache counts as long as it has room, because the number of its tokens is on the device.

    Args: found: the attention module; reach: the longest context, in tokens.
    """

    def __init__(self, found: Attention, reach: int):
        self._layer, self._arguments, self._reach = found.layer, found.arguments, reach
        self.handle: RemovableHandle = found.module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs} if args else kwargs
        hidden = given.get("hidden_states")
        if hidden is None:
            return
        cache = given.get(CACHE_NAMES[0]) or given.get(CACHE_NAMES[1])
        if (tokens := _tokens(cache, self._layer, hidden.shape[1])) > self._reach:
            self.handle.remove()
            warnings.warn(beyond(tokens, self._reach), stacklevel=2)


def _tokens(cache: Any, layer: int, new: int) -> int:
    """Return the length of a context after a call with `new` tokens."""
    held: Any = cache.layers[layer] if isinstance(cache, Cache) and layer < len(cache.layers) else None
    if held is None:
        return new
    known = held.get_seq_length()
    return known + new if isinstance(known, int) else int(held.max_cache_len)
