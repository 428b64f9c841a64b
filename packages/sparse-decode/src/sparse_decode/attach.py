"""Attach sparse attention to a model, and detach it."""

# Configs of transformers have no types.
# pyright: reportUnknownMemberType=false

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from hashtrain.adapters import other_adapter
from hashtrain.models import text_decoder
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from sparse_decode import session
from sparse_decode.budget import Budget
from sparse_decode.caches.cache import cache_layer, retype
from sparse_decode.caches.growing import FROM, GrowingLayer, Owned, may_grow
from sparse_decode.interface import Hook, register
from sparse_decode.model import (
    CACHE_NAMES,
    NAMES,
    NO_COPY,
    Attention,
    AttentionName,
    dense_modules,
    dense_name,
    require_attachable,
    set_attention,
    sparse_modules,
)
from sparse_decode.planning import plan_layers, require_arguments
from sparse_decode.prompt import feed_in_chunks, mark_sparse, require_sparse_prompts
from sparse_decode.select import KeyQueryHasher, Selector
from sparse_decode.step import SparseLayer

_COPIER = "__reduce_ex__"
"""What `copy` and `pickle` ask of an object itself, not of its class."""


class Attachment:
    """Sparse attention on one model, until `detach`: prompts stay dense, decode steps of full attention are sparse.

    On a CPU, dense attention runs by our kernels where they are faster than the model's, and `generate` feeds long
    prompts in chunks. `attach` is another name of this class.

    Args:
        model: a Hugging Face decoder with "sdpa", "eager" or "flash_attention_2" attention, which dense calls keep
            using. Its files and weights are not changed.
        hasher: a hasher (such as `hashtrain.Hasher`), which is read once, or a `Selector`. None: every layer stays
            dense, nothing is lost, and on a CPU prompts and steps run by our kernels where they are faster than the
            model's attention.
        budget: tokens per row, divided among layers and KV heads if the hasher has shares for them. Default: 2 %, with
            steps dense below the context length from which a sparse step is predicted to be faster, so that attaching
            slows a step by at most about 2 %.
        dense_layers: the layers that stay dense: the number of first layers, or a set of indices. Default: the layers
            that the hasher lists, because training measured a high cost for them; none with another selector.
        remainder: add the unselected tokens of each row as one token of mean value and estimated weight (eq. 15, 16),
            if the hasher is calibrated for it, as those of `hashtrain` are; see `Attachment.remainder`. The mask may
            then not change for earlier tokens: a decode step on CUDA does not check this, and outputs NaN in such a
            row until the cache is discarded. On the CPU the sums are recomputed; a compiled step raises an error.
        kv: where the sparse layers of dynamic caches store keys and values. "host": in host memory, pinned if there is
            a GPU; codes stay on the device, and a sparse step copies only the selected rows to it.
        prompt: "sparse": in the full-attention layers that `dense_layers` does not name, blocks of 32 rows of a prompt
            read the first 16 and last 256 tokens that they see, and a tenth of the others, found by exact products of
            every second row (cpu/prompt_kernels.py). For bfloat16 on a CPU with AVX512_BF16.
        sparse_rows: for evaluations: in every call, rows from this position of the batch on are sparse, padding
            included, so that one pass scores a whole text as decoding it after a dense prompt of so many tokens
            would, however it is chunked. None: the rows of decode steps.
    Raises: ValueError if the model, its attention or the hasher is not supported; the model is then unchanged.
    Attributes:
        model: the model. prompt: as given.
        layers: indices of its sparse layers.
        remainder: whether any of them adds the remainder of its selections.
        break_even: the predicted context length from which a sparse step is faster than a dense one, and below which
            steps stay dense; None with a budget.
    """

    def __init__(
        self, model: PreTrainedModel, hasher: KeyQueryHasher | Selector | None = None, budget: Budget | None = None, *,
        dense_layers: int | Collection[int] | None = None, remainder: bool = True,
        kv: Literal["device", "host"] = "device", prompt: Literal["exact", "sparse"] = "exact",
        sparse_rows: int | None = None,
    ):  # fmt: skip
        require_arguments(budget, dense_layers, sparse_rows, kv, prompt)
        require_attachable(model)
        self.model: PreTrainedModel = model
        self._on_host = kv == "host"
        self.prompt: str = prompt
        self._handles: list[RemovableHandle] = []
        self._name: AttentionName | None = None
        self._owned = Owned()
        self._dense: tuple[int, ...] = ()
        if prompt == "sparse":
            require_sparse_prompts(model)
        given = getattr(hasher, "dense_layers", ()) if dense_layers is None else dense_layers
        dense = range(given) if isinstance(given, int) else given
        modules, self._layers = plan_layers(model, hasher, budget, dense, sparse_rows, self._on_host, remainder)
        lengths = [layer.budget.dense_below for layer in self._layers.values()] if budget is None else []
        self.break_even: int | None = next(filter(None, lengths), None)
        self.layers: tuple[int, ...] = tuple(modules)
        self.remainder: bool = any(layer.remainder is not None for layer in self._layers.values())
        if (words := other_adapter(hasher, model)) is not None:
            warnings.warn(words, stacklevel=2)
        self._switch_on(modules, dense)
        if modules and (reach := getattr(hasher, "reach", None)) is not None:
            self._layers[min(modules)].reach = reach

    def _switch_on(self, modules: Mapping[int, Attention], dense_layers: Collection[int]) -> None:
        """Set the model's attention, and hook its sparse layers."""
        model = self.model
        sparse = sparse_modules(model, dense_layers) if self.prompt == "sparse" else {}
        register()
        self._config = cast(Any, text_decoder(model).config)
        dense = dense_name(model)
        name = AttentionName.of(NAMES[dense], dense, model)
        set_attention(model, name)
        vars(model)[_COPIER] = self.__reduce_ex__  # refuses shallow copies, too, which would keep `feed_in_chunks`
        self._name, self._undo = name, [feed_in_chunks(model), lambda: vars(model).pop(_COPIER, None)]
        self._undo.append(mark_sparse(sparse))
        dense_ones = dense_modules(model, modules)
        self._dense = tuple(found.layer for found in dense_ones)
        if not modules and dense_ones:
            watch = partial(self._grow_long, dense_ones[0])
            self._handles.append(dense_ones[0].module.register_forward_pre_hook(watch, with_kwargs=True))
        ways = (self._config, name), self._held, self._owned, not self._on_host
        for layer, found in modules.items():
            hook = Hook(self._layers[layer], found.arguments, *ways)
            self._handles.append(found.module.register_forward_pre_hook(hook, with_kwargs=True))

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Restore the model, and turn the caches filled meanwhile into plain ones. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._name is not None:
            self._name.end()
            if self._config._attn_implementation == self._name:  # the caller may have set another one
                set_attention(self.model, self._name.dense)
            self._name = None
            for undo in self._undo:
                undo()
        self._owned.release()

    def counts(self) -> dict[int, tuple[int, int]]:
        """Return (selected, visible) tokens by layer, summed over all sparse rows and query heads so far."""
        found = {index: layer.counts() for index, layer in self._layers.items()}
        return {layer: (selected, visible) for layer, (selected, visible) in found.items() if visible}

    def density(self) -> dict[int, float]:
        """Return selected / visible by layer so far, with sink and recent tokens, without prefill and dense layers.

        A decode step that was dense because of `dense_below` counts as 1.
        """
        return {layer: selected / visible for layer, (selected, visible) in self.counts().items()}

    def reset_density(self) -> None:
        """Reset the counts of `counts` and `density`."""
        for layer in self._layers.values():
            layer.tally.reset()
            layer.shared.reset()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY)

    def _grow_long(self, found: Attention, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the layers of a cache grow in place once that of this module is long: its forward pre-hook."""
        if torch.compiler.is_compiling():
            return
        given = {**dict(zip(found.arguments, args, strict=False)), **kwargs} if args else kwargs
        hidden, cache = given.get("hidden_states"), given.get(CACHE_NAMES[0]) or given.get(CACHE_NAMES[1])
        if hidden is None or not may_grow(hidden) or type(cache) is not DynamicCache:
            return
        held = cache.layers[found.layer] if found.layer < len(cache.layers) else None
        if type(held) is DynamicLayer and held.get_seq_length() >= FROM:
            self._grow(cache)

    def _grow(self, cache: Any) -> None:
        """Make the filled cache layers of dense layers grow in place, on the CPU."""
        if type(cache) is not DynamicCache:
            return
        for index in self._dense:
            held = cache.layers[index] if index < len(cache.layers) else None
            if type(held) is DynamicLayer and held.is_initialized and held.device.type == "cpu":
                retype(held, self._owned)

    def memory(self, cache: Cache) -> tuple[int, int]:
        """Return the bytes of a cache: keys and values of all layers; codes and sums of the remainder."""
        kv = codes = 0
        own_cache: Any = getattr(cache, "self_attention_cache", cache)
        for held in own_cache.layers:
            own = [x.nbytes for name in ("keys", "values") if (x := getattr(held, name, None)) is not None]
            kv += sum(own)
            if sum(own) and getattr(held, "encoder", None) is not None:
                codes += held.codes.nbytes + sum(x.nbytes for x in held.sums.tensors)
        return kv, codes

    def save(self, cache: Cache, path: str | os.PathLike[str], tokens: Tensor | Sequence[int]) -> None:
        """Write a cache to a session file, of which `load` maps keys, values and codes; an old file stays until then.

        Args: cache: a DynamicCache that this attachment's model has filled. tokens: those that it holds, integers [T]
            or [B, T], with padding if there is some; its mask is not stored. Nor is the budget, on which keys and
            values of sparse rows depend.
        Raises: ValueError if the cache is of another kind, or the hasher is not one of hashtrain's, which have digests.
        """
        session.save(self, cache, path, tokens)

    def load(
        self, path: str | os.PathLike[str], tokens: Tensor | Sequence[int] | None = None, *, verify: bool = True
    ) -> tuple[DynamicCache, Tensor]:
        """Return the cache of a session file, on the CPU mapped in place of read, and its tokens, int64 [B, T].

        The file must not be written while the cache is in use; `save` replaces it, which is safe. An attachment without
        a hasher takes keys and values only.

        Args: tokens: a prompt to continue, [T] or [B, T]: the cache is cut to the tokens that begin it, but its last
            one is never taken, because a model must run it. verify: compare the checksum of all arrays, for which the
            whole file is read once; that of the header is always compared.
        Raises: ValueError if the file is damaged, of another model or hasher, or does not begin the prompt.
        """
        return session.load(self, path, tokens, verify)

    def prepare(self, cache: Cache) -> Cache:
        """Make a cache carry codes before its first call. Needed only if that call is compiled.

        A static cache must be allocated first: call its `early_initialization`.
        Returns: the same cache.
        """
        for layer in self._layers.values():
            self._held(layer, cache)
        return cache

    def _held(self, layer: SparseLayer, cache: Any) -> CacheLayerMixin:
        """Return the cache's layer, carrying codes if the selector needs them."""
        held = cache_layer(cache, layer.layer)
        if getattr(held, "encoder", None) is layer.encoder:
            return held
        if not layer.selector.needs_codes:
            return held
        if torch.compiler.is_compiling():
            raise ValueError("the first call with a cache must not be compiled; call prepare(cache) on the attachment")
        if not self._on_host:
            self._grow(cache)
        elif type(held) not in (DynamicLayer, GrowingLayer):
            raise ValueError(f'kv="host" needs a DynamicCache, got a layer of type {type(held).__name__}')
        return retype(held, self._owned, layer.encoder, self._on_host)


attach = Attachment
"""Make a model sparse, in a `with` statement or until `detach`."""
