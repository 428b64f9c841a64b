"""The attention function that Hugging Face calls.

A hook on each sparse attention module hands this function one more keyword, `sparse_decode`: the `Call`. It travels
with the arguments because module state is shared by threads and context variables break compilation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import CacheLayerMixin, StaticLayer
from transformers.masking_utils import eager_mask, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparse_decode import flash
from sparse_decode.offload import HostLayer
from sparse_decode.opaque import attend_step
from sparse_decode.plan import Inputs, LayerPlan, trim
from sparse_decode.remainder import StaticMeans

# Hugging Face looks for "flash", "sdpa" and "flex" inside these names: keep such words out.
NAMES = {"sdpa": "sparse_decode", "eager": "sparse_decode_eager"}
"""Our attention by the dense one it replaces."""

FLASH_NAME = "sparse_decode_fa"
"""Our attention with every dense call through flash-attn, whatever it replaces."""

KEYWORD = "sparse_decode"

Output = tuple[Tensor, Tensor | None]


class Call:
    """What the attention function must know of one call: the layer's plan, and the layer of the cache.

    It has no `to` method and holds no tensor of its own, so that what moves a module's inputs leaves it alone.
    """

    __slots__ = ("cache", "plan")

    def __init__(self, plan: LayerPlan, cache: CacheLayerMixin | None):
        self.plan: LayerPlan = plan
        self.cache: CacheLayerMixin | None = cache

    def codes(self, k: Tensor) -> Tensor | None:
        """Return the codes of the cached keys k [B, Hkv, N, D]: carried by the cache, or hashed now without one."""
        if not self.plan.selector.needs_codes:
            return None
        if self.cache is None:
            return self.plan.encoder(k)
        codes: Tensor = self.cache.codes  # pyright: ignore[reportAttributeAccessIssue]
        if codes.shape[2] != k.shape[2]:
            raise ValueError(
                f"the cache must carry a code for each of its {k.shape[2]} keys, got {codes.shape[2]}; something "
                "changed its keys without its methods"
            )
        return codes


def register() -> None:
    """Make our names known to Hugging Face: the attention, and the mask without which padding would be ignored."""
    masks = {NAMES["sdpa"]: sdpa_mask, NAMES["eager"]: eager_mask, FLASH_NAME: flash_attention_mask}
    for name, mask in masks.items():
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Output:
    """Attend, sparsely where the plan says so.

    Args: as Hugging Face gives them; query [B, Hq, Q, D], key and value [B, Hkv, N, D], mask [B, 1, Q, N] or None.
    Returns: [B, Q, Hq, D], and attention weights only from dense eager attention.
    """
    call: Call | None = kwargs.pop(KEYWORD, None)
    # A static cache returns all its room; its length is a tensor, which a compiled graph must not read.
    length = call.cache.cumulative_length if call is not None and isinstance(call.cache, StaticLayer) else None
    compiling = torch.compiler.is_compiling()
    end = key.shape[2] if length is None or compiling else int(length)

    def dense() -> Output:
        k, v = key, value
        if call is not None and isinstance(call.cache, HostLayer):
            k, v = call.cache.all_on(query.device)
        return dense_attention(module)(module, query, k, v, attention_mask, scaling=scaling, dropout=dropout, **kwargs)

    if call is None or not call.plan.rule.may_be_sparse(query.shape[2], end):
        return dense()
    _refuse(kwargs, dropout)
    plan, softcap, sinks = call.plan, kwargs.get("softcap"), kwargs.get("s_aux")
    factor = float(query.shape[3] ** -0.5 if scaling is None else scaling)
    if compiling:
        codes = None if call.cache is None else call.codes(key)  # without a cache they are hashed inside
        means = getattr(call.cache, "means", None)
        sums = means.tensors if plan.remainder is not None and isinstance(means, StaticMeans) else []
        rest = (sinks, plan.tally, sums, plan.number, factor, softcap)
        return attend_step(query, key, value, codes, attention_mask, length, *rest), None
    host = call.cache if isinstance(call.cache, HostLayer) else None
    small = plan.all_dense(end)
    k, v, codes = trim(key, value, None if small else call.codes(key), length)
    means = getattr(call.cache, "means", None)
    x = Inputs(query, k, v, attention_mask, codes, host, factor, softcap, sinks, means)
    if small:
        plan.count_dense(x)
        return dense()
    out, sparse = plan.attend(x)
    if sparse is None or sparse.all():
        return out, None
    return torch.where(sparse[..., None, None], out, dense()[0]), None


def dense_attention(module: Any) -> Callable[..., Output]:
    """Return the attention that the model calls without us."""
    if module.config._attn_implementation == FLASH_NAME:
        return flash_attention
    if module.config._attn_implementation in ("eager", NAMES["eager"]):
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS["sdpa"]


def flash_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Output:
    """Attend densely through flash-attn, in the form that Hugging Face gives its attention functions."""
    flash.refuse(attention_mask, kwargs.get("s_aux"), dropout)
    factor = float(query.shape[3] ** -0.5 if scaling is None else scaling)
    return flash.dense(query, key, value, factor, kwargs.get("softcap")), None


def _refuse(kwargs: dict[str, Any], dropout: float) -> None:
    if kwargs.get("position_bias") is not None:
        raise ValueError("sparse attention does not support position_bias; leave this model dense")
    if kwargs.get("is_causal") is False:
        raise ValueError("sparse attention is causal, got is_causal=False; leave this model dense")
    if dropout:
        raise ValueError(f"sparse attention has no dropout, got {dropout}; call model.eval() first")
