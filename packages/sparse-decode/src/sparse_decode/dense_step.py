"""Which dense calls of an attached model our own kernel attends to: decode steps on the CPU.

Everything else goes the model's own way: other devices, prompts, training, dropout, returned weights, biases. So does a
row that sees no token, for which each implementation has its own answer.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.output_capturing import _active_collector

from sparse_decode.attend import KINDS
from sparse_decode.dense import attend_all
from sparse_decode.modes import autocasts

QUIET = frozenset({"position_ids", "cache_position", "use_cache"})
"""Keywords that reach attention and mean nothing to it."""
MOST_ROWS = 16
"""Query rows of a sequence up to which a call with a past is a decode step: more than that are a piece of a prompt."""


@cache
def own_from(dtype: torch.dtype) -> int:
    """Return from how many tokens on our kernel attends; below, torch's own takes less time.

    Where the processor multiplies matrices of 16-bit numbers itself (AMX, or AVX-512 for float16), torch is faster for
    longer. Measured on an Intel Xeon with AMX and an AMD EPYC without (docs/log.md).
    """
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if dtype == torch.bfloat16 and able.get("amx_bf16"):
        return 8192
    if dtype == torch.float16 and able.get("avx512_fp16"):
        return 32768
    return 256


def attend_by_torch(query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None) -> Tensor:
    """Attend with one row a sequence, that sees all tokens, as transformers lets torch do it: [B, 1, Hq, Dv].

    This is all that transformers' function does in such a call, without asking what it is.
    """
    shared = query.shape[1] != key.shape[1]
    if shared and not key.shape[3] == value.shape[3] <= 256:
        query = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
        shared = False
    out = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=shared)
    return out.reshape(out.shape[0], 1, -1, value.shape[3])


def attend_step(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    eager: bool,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """Attend to all visible tokens in a decode step: [B, R, Hq, Dv]; None if this is none, or not for our kernel.

    Args:
        module: the attention module; eager: whether it would attend by its own eager function, which knows soft-capping
            and learned sinks, or by torch's.
        query [B, Hq, R, D], key and value [B, Hkv, N, D], mask [B or 1, 1, R, N]; kwargs: as Hugging Face gives them.
    """
    if torch.compiler.is_compiling() or not _fits(query, key, value) or _asks_for_more(module, dropout, kwargs):
        return None
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if not eager and (softcap is not None or sinks is not None):
        return None
    rows, n = query.shape[2], key.shape[2]
    if mask is None:
        if rows > 1:
            return None
        return attend_all(query, key, value, scaling, softcap=softcap, sinks=sinks)
    if mask.shape[1] != 1 or mask.shape[-2:] != (rows, n):
        return None
    shown = _shown(mask)
    return None if shown is None else attend_all(query, key, value, scaling, shown, softcap=softcap, sinks=sinks)


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Say whether these are the tensors of a decode step, in a form that the kernel reads in place."""
    rows, n = query.shape[2], key.shape[2]
    if not 0 < rows <= MOST_ROWS or (rows > 1 and rows >= n) or not query.shape[0]:
        return False
    given = query, key, value
    if any(type(x) is not Tensor or x.device.type != "cpu" or x.requires_grad for x in given):
        return False
    alike = query.dtype in KINDS and query.dtype == key.dtype == value.dtype and query.shape[1] % key.shape[1] == 0
    return alike and key.stride(3) == 1 and value.stride(3) == 1 and not autocasts(query.device)


def _asks_for_more(module: Any, dropout: float, kwargs: dict[str, Any]) -> bool:
    """Say whether a call wants what the kernel has not: dropout, biases, keys masked by head, weights returned."""
    if dropout or module.training or kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
        return True
    if getattr(module, "masked_key_indices", None) is not None or kwargs.get("output_attentions"):
        return True
    return any("attentions" in name for name in _active_collector.get() or ())


def _shown(mask: Tensor) -> Tensor | None:
    """Say which tokens a mask shows, bool; None if it has biases."""
    if mask.dtype == torch.bool:
        return mask
    shown = mask == 0
    return shown if bool((shown | (mask <= torch.finfo(mask.dtype).min / 2)).all()) else None
