"""Dense calls of an attached model: decode steps on the CPU with our own kernel.

All other calls use the model's own attention: other devices, prompts, training, dropout, returned weights, biases. So
do rows without visible tokens, for which implementations differ.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from sparse_decode.attention.attend_inputs import KINDS
from sparse_decode.attention.dense import attend_all
from sparse_decode.model import FLASH, NAMES
from sparse_decode.modes import readable

QKV = tuple[Tensor, Tensor, Tensor]
"""Queries [B, Hq, R, D], keys and values [B, Hkv, N, D]."""
Output = tuple[Tensor, Tensor | None]
"""Of an attention function: [B, Q, Hq, D], and the attention weights [B, Hq, Q, N] or None."""

QUIET = frozenset({"position_ids", "cache_position", "use_cache"})
"""Keyword arguments that attention functions get and ignore."""
MASKED = "masked_key_indices"
"""Attribute by which AdaKV presses mask keys per head. Read from the module's `__dict__`: torch's own lookup of what a
module does not have takes as long as an operator."""
EAGER = "eager", NAMES["eager"]
"""Names of attention that replace the model's eager attention, and its own name."""
MOST_ROWS = 16
"""A call with a non-empty cache and at most this many query rows is a decode step; more are part of a prompt."""


def own_from() -> dict[torch.dtype, int]:
    """Return the number of tokens from which our kernel attends, by type; below it, torch's own takes less time.

    Where the CPU multiplies matrices of 16-bit numbers itself (AMX, or AVX-512 for float16), torch is faster for
    longer. Measured on an Intel Xeon with AMX and an AMD EPYC without (docs/log.md).
    """
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return {
        torch.float32: 256,
        torch.bfloat16: 8192 if able.get("amx_bf16") else 256,
        torch.float16: 32768 if able.get("avx512_fp16") else 256,
    }


OWN_FROM = own_from()
"""The same, of this machine: a table, because compiled graphs cannot contain a cached function."""


def attend_by_torch(query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None) -> Tensor:
    """Attend with one row per sequence that sees all tokens, with torch's attention: [B, 1, Hq, Dv].

    Does the same as transformers' function in this case, without its checks.
    """
    shared = query.shape[1] != key.shape[1]
    if shared and not key.shape[3] == value.shape[3] <= 256:
        query = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
        shared = False
    out = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=shared)
    return out.reshape(out.shape[0], 1, -1, value.shape[3])


def attend_visible(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scaling: float) -> Tensor:
    """Attend to the tokens that are `seen`, bool [B or 1, 1, R, N] or None for all, with torch's attention."""
    out = F.scaled_dot_product_attention(query, key, value, seen, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def with_means(out: Tensor, value: Tensor, sees: Tensor) -> Tensor:
    """Set rows of out [B, R, Hq, Dv] without visible tokens to the mean of all values, as eager attention does.

    Its mask adds the most negative number of the dtype to each logit, so that all logits become equal.

    Args: value: all values [B, Hkv, N, Dv]; sees: whether a row sees any token, bool [B or 1, R].
    """
    if out.device.type == "cpu" and torch.compiler.is_compiling():
        return _with_means(out, value, sees)
    if readable(sees) and sees.all():
        return out
    return _replaced(out, value, sees)


@torch.library.custom_op("sparse_decode::with_means", mutates_args=())
def _with_means(out: Tensor, value: Tensor, sees: Tensor) -> Tensor:
    """`with_means` in a graph of the CPU, where the values need not be read for nothing."""
    return out.clone() if sees.all() else _replaced(out, value, sees)


_with_means.register_fake(lambda out, value, sees: torch.empty_like(out))


def _replaced(out: Tensor, value: Tensor, sees: Tensor) -> Tensor:
    mean = value.mean(2, dtype=torch.float32).repeat_interleave(out.shape[2] // value.shape[1], 1)
    return torch.where(sees[..., None, None], out, mean[:, None].to(out.dtype))


def _attend_step(qkv: QKV, mask: Tensor | None, scaling: float, eager: bool, kwargs: dict[str, Any]) -> Tensor | None:
    """Attend to all visible tokens in a decode step: [B, R, Hq, Dv]; None if our kernel does not support the call.

    Args: eager: whether the module would use its own eager function, which supports soft-capping and learned sinks, or
        torch's attention; kwargs: as Hugging Face gives them.
    """
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if not eager and (softcap is not None or sinks is not None):
        return None
    rows, n = qkv[0].shape[2], qkv[1].shape[2]
    if mask is not None:
        mask = _shown(mask) if mask.shape[1] == 1 and mask.shape[-2:] == (rows, n) else None
        if mask is None:
            return None
    elif rows > 1:
        return None
    return attend_all(*qkv, scaling, mask, softcap=softcap, sinks=sinks)


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether these are the tensors of a decode step, with dtypes and strides that the kernel supports."""
    rows, n = query.shape[2], key.shape[2]
    if not 0 < rows <= MOST_ROWS or (rows > 1 and rows >= n) or not query.shape[0]:
        return False
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor:
        return False
    if not (query.is_cpu and key.is_cpu and value.is_cpu) or torch.is_autocast_enabled("cpu"):
        return False
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return False
    alike = query.dtype in KINDS and query.dtype == key.dtype == value.dtype and query.shape[1] % key.shape[1] == 0
    return alike and key.stride(3) == 1 and value.stride(3) == 1


def _asks_for_more(module: Any, dropout: float, kwargs: dict[str, Any]) -> bool:
    """Whether a call needs a feature that the kernel lacks: dropout, biases, keys masked per head, returned weights."""
    if dropout or module.training or kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
        return True
    if module.__dict__.get(MASKED) is not None or kwargs.get("output_attentions"):
        return True
    recorded = _active_collector.get()
    return bool(recorded) and any("attentions" in name for name in recorded)


def _shown(mask: Tensor) -> Tensor | None:
    """Convert a mask to bool, True for visible tokens; None if it has biases."""
    if mask.dtype == torch.bool:
        return mask
    shown = mask == 0
    return shown if bool((shown | (mask <= torch.finfo(mask.dtype).min / 2)).all()) else None


def dense_attention(module: Any) -> Callable[..., Output]:
    """Return the attention function that the model uses when not attached."""
    if module.config._attn_implementation == NAMES[FLASH]:
        return _by_flash
    if module.config._attn_implementation in EAGER:
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS["sdpa"]


def attend_densely(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, set_to: str | None = None, **kwargs: Any,
) -> Output:  # fmt: skip
    """Attend to all visible tokens: long decode steps on the CPU with our kernel, all other calls as the model does.

    Args: those of `interface.attention`; set_to: the attention that the module's config names, if known: reading it
        there takes six calls.
    """
    name = set_to or module.config._attn_implementation
    alone = mask is None and query.shape[2] == 1
    if key.shape[2] < OWN_FROM.get(key.dtype, 256):
        if alone and name == NAMES["sdpa"] and kwargs.keys() <= QUIET:
            return attend_by_torch(query, key, value, dropout, scaling), None
    else:
        asks = torch.compiler.is_compiling() or not _fits(query, key, value) or _asks_for_more(module, dropout, kwargs)
        if not asks:
            factor = float(query.shape[3] ** -0.5 if scaling is None else scaling)
            out = _attend_step((query, key, value), mask, factor, name in EAGER, kwargs)
            if out is not None:
                return out, None
    if alone and name in EAGER:
        mask = query.new_zeros(1, 1, 1, key.shape[2])  # some eager attention functions add a mask unconditionally
    return dense_attention(module)(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)


def _by_flash(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Output:
    """Attend as a model with flash attention does; mask: its own [B, N], or that of one row, [B, 1, 1, N]."""
    own, own_config = copy.copy(module), copy.copy(module.config)
    own.config, own_config._attn_implementation_internal = own_config, FLASH  # by this name it finds the library
    mask = mask if mask is None or mask.dim() == 2 else mask[:, 0, 0].expand(len(q), -1)
    return ALL_ATTENTION_FUNCTIONS[FLASH](own, q, k, v, mask, **options)
