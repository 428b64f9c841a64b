"""Dense calls of an attached model: on the CPU with our own kernels where they are faster, else as the model does them.

The model's own attention is for other devices, training, dropout, returned weights, biases and masks with holes.
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

from sparse_decode.cpu.bfloat_lanes import supported
from sparse_decode.cpu.dense import attend_all, attend_in_parts, attend_rows
from sparse_decode.inputs import KINDS
from sparse_decode.intervals import causal, is_interval, visible
from sparse_decode.model import FLASH, NAMES

Output = tuple[Tensor, Tensor | None]
"""Of an attention function: [B, Q, Hq, D], and the attention weights [B, Hq, Q, N] or None."""

IGNORED_KEYWORDS = frozenset({"position_ids", "cache_position", "use_cache"})
"""Keyword arguments that attention functions get and ignore."""
MASKED_PER_HEAD = "masked_key_indices"
"""Attribute by which AdaKV presses mask keys per head. Read from the module's `__dict__`: torch's own lookup of what a
module does not have takes as long as an operator."""
PROMPT_FRACTION = "sparse_decode_prompt_fraction"
"""Attribute of a module whose prompts are sparse: the share of the tokens that are not always read."""
SPARSE_FROM = 2048
"""Tokens from which such prompts are sparse: below, there is less to gain than a tenth of the time."""
EAGER = "eager", NAMES["eager"]
"""Names of attention that replace the model's eager attention, and its own name."""
MOST_ROWS = 16
"""A call with a non-empty cache and at most this many query rows is a decode step; more are part of a prompt."""
PROMPT_FROM = 512
"""Tokens from which our kernel attends for rows of prompts that torch could attend for without a mask."""
MASKED_FROM = 256
"""The same for rows that torch needs a mask for, and computes all of, visible or not: in every type."""


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


def attend_densely(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> Output:  # fmt: skip
    """Attend to all visible tokens: long decode steps on the CPU with our kernel, all other calls as the model does.

    Args: those of `interface.attention`.
    """
    name, rows = module.config._attn_implementation, query.shape[2]
    if rows == 1 and mask is None and key.shape[2] < OWN_FROM.get(key.dtype, 256):
        if name == NAMES["sdpa"] and kwargs.keys() <= IGNORED_KEYWORDS:
            return attend_by_torch(query, key, value, dropout, scaling), None
    elif mask is None and rows > 1 and getattr(module, "is_causal", True) is False:  # as in cross-attention
        return dense_attention(module)(module, query, key, value, None, scaling=scaling, dropout=dropout, **kwargs)
    elif not _asks_for_more(module, dropout, kwargs):
        softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
        if name in EAGER or (softcap is None and sinks is None):  # torch's own attention supports neither
            out = _attend_ourselves(module, query, key, value, mask, scaling, softcap, sinks)
            if out is not None:
                return out, None
    given = as_mask(mask, query, key, name)
    return dense_attention(module)(module, query, key, value, given, scaling=scaling, dropout=dropout, **kwargs)


def _attend_ourselves(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """Attend with our kernels, or with torch's without a mask, where that is faster; else return None."""
    name, rows = module.config._attn_implementation, query.shape[2]
    if rows > MOST_ROWS and name == NAMES["sdpa"] and (starts := _starts(query, key, value, mask)) is not None:
        return attend_in_parts(query, key, value, scaling, starts)
    if not _is_ours(query, key, value, mask, name in EAGER):
        return None
    factor = float(query.shape[3] ** -0.5 if scaling is None else scaling)
    given = query, key, value, factor, None if mask is None else mask[:, 0]
    if rows <= MOST_ROWS:
        return attend_all(*given, softcap=softcap, sinks=sinks)
    fraction = module.__dict__.get(PROMPT_FRACTION) if key.shape[2] >= SPARSE_FROM else None
    return attend_rows(*given, softcap=softcap, sinks=sinks, fraction=fraction)


def as_mask(mask: Tensor | None, query: Tensor, key: Tensor, name: str) -> Tensor | None:
    """Return a mask as the model's own attention takes it.

    Intervals become bool [B, 1, Q, N], for eager attention numbers, and for flash attention bool [B, N].
    """
    rows, n, eager = query.shape[2], key.shape[2], name in EAGER
    if mask is not None and not is_interval(mask):
        return mask
    if mask is None and rows == 1:  # some eager attention functions add a mask unconditionally
        return query.new_zeros(1, 1, 1, n) if eager else None
    if mask is None and not eager and (rows == n or name != NAMES["sdpa"]):
        return None  # with fewer rows, torch would align the first one with the first token
    interval = causal(1, rows, n, query.device) if mask is None else mask[:, 0]
    if name == NAMES[FLASH]:  # which leaves the keys behind its mask out: a static cache has room there
        return torch.arange(int(interval[:, -1, 1].max()), device=interval.device) >= interval[:, -1, :1]
    shown = visible(interval, n)
    if not eager:
        return shown
    return query.new_zeros(shown.shape).masked_fill(~shown, torch.finfo(query.dtype).min)


def _is_ours(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, eager: bool) -> bool:
    """Whether our kernels support these tensors and this mask, and are faster than the model's attention."""
    rows, n, kind = query.shape[2], key.shape[2], key.dtype
    if not _is_plain(query, key, value, mask) or key.stride(3) != 1 or value.stride(3) != 1:
        return False
    if rows <= MOST_ROWS:
        return (rows == 1 or rows < n) and n >= OWN_FROM[kind]
    if kind == torch.bfloat16 and supported():
        return query.stride(3) == 1 and n >= (PROMPT_FROM if mask is None and rows == n and not eager else MASKED_FROM)
    # Other types: torch's products are faster, but it computes hidden ones, too: before sliding windows, and half of a
    # whole prompt's with eager attention.
    return kind != torch.float16 and n >= MASKED_FROM and (rows == n if eager else mask is not None)


def _is_plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether these are ordinary tensors on the CPU, of one type, and the mask is one of intervals."""
    kind = key.dtype
    if torch.compiler.is_compiling() or not (query.shape[2] and query.shape[0]) or torch.is_autocast_enabled("cpu"):
        return False
    if any(type(x) is not Tensor or not x.is_cpu or x.requires_grad for x in (query, key, value)):
        return False
    alike = kind in KINDS and query.dtype == kind == value.dtype and query.shape[1] % key.shape[1] == 0
    return alike and (mask is None or is_interval(mask))


def _starts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> list[int] | None:
    """Return the first token that the rows of each sequence see, for `attend_in_parts`.

    None if that is not for these tensors, if torch needs no mask for them, or if rows see less than all from there to
    their own token.
    """
    rows, n, alike = query.shape[2], key.shape[2], key.shape[3] == value.shape[3]
    if n < MASKED_FROM or (mask is None and rows == n) or not alike or not _is_plain(query, key, value, mask):
        return None
    if any(x.stride(3) != 1 for x in (query, key, value)):
        return None
    if key.dtype == torch.bfloat16 and supported():
        return None
    if mask is None:
        return [0] * len(query)
    starts, ends = mask[:, 0].unbind(-1)
    if not torch.equal(ends, causal(1, rows, n, ends.device)[..., 1].expand_as(ends)):
        return None
    return starts[:, -1].tolist() if torch.equal(starts, starts[:, -1:].minimum(ends)) else None


def _asks_for_more(module: Any, dropout: float, kwargs: dict[str, Any]) -> bool:
    """Whether a call needs a feature that the kernel lacks: dropout, biases, keys masked per head, returned weights."""
    if dropout or module.training or kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
        return True
    return module.__dict__.get(MASKED_PER_HEAD) is not None or wants_weights(kwargs)


def wants_weights(kwargs: dict[str, Any]) -> bool:
    """Whether the caller of the model wants attention weights."""
    recorded = _active_collector.get() or ()
    return bool(kwargs.get("output_attentions")) or any("attentions" in name for name in recorded)


def dense_attention(module: Any) -> Callable[..., Output]:
    """Return the attention function that the model uses when not attached."""
    if module.config._attn_implementation == NAMES[FLASH]:
        return _by_flash
    if module.config._attn_implementation in EAGER:
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS["sdpa"]


def _by_flash(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Output:
    """Attend as a model with flash attention does; mask: bool [B, N] or None."""
    own, own_config = copy.copy(module), copy.copy(module.config)
    own.config, own_config._attn_implementation_internal = own_config, FLASH  # by this name it finds the library
    return ALL_ATTENTION_FUNCTIONS[FLASH](own, q, k, v, mask, **options)
