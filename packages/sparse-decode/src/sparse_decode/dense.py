"""Dense calls of an attached model: on the CPU with our own kernels where they are faster, else as the model does them.

The model's own attention is for other devices, training, dropout, returned weights, biases and masks with holes.

On a CPU, `generate` feeds long prompts in chunks, and they may be sparse. All layers run on one chunk before the next,
so that memory does not grow with a prompt's length: what a chunk needs beside its keys and values is CHUNK rows of
activations. Matrix products of CHUNK rows are also at least as fast as those of all rows, which do not fit the caches.
"""

import copy
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from hashtrain.data.offsets import rope_kinds
from hashtrain.models import text_decoder
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from sparse_decode.caches.buffer import coming
from sparse_decode.cpu.bfloat_lanes import supported
from sparse_decode.cpu.dense import attend_all, attend_rows
from sparse_decode.inputs import KINDS
from sparse_decode.intervals import causal, is_interval, visible
from sparse_decode.model import FLASH, NAMES, Attention

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
CHUNK = 2048
"""Rows of a prompt at a time."""
FRACTION = 0.1
"""Share of the tokens that a sparse prompt reads, of those that it does not always read."""
_OF_TEXT = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
"""What `generate` gives a model with a prompt of text alone."""
_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Torch's kernel: it also returns the logarithm of each row's sum of weights."""
_PREFILL = "_prefill"
"""The method of `generate` that runs the prompt. It can split it, but has to be told."""


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


def attend_in_parts(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, starts: list[int]) -> Tensor:
    """Attend with the last R of N tokens by torch's kernel: to those before them, then among themselves.

    One pass over all tokens would need a mask, and compute what it hides.

    Args: starts: the first token that the rows of each sequence see.
    Returns: [B, R, Hq, D], zeros for a row that sees no token.
    """
    (batch, hq, rows, dim), hkv, n = query.shape, key.shape[1], key.shape[2]
    out = torch.zeros(batch, rows, hq, dim, dtype=query.dtype)
    for b, start in enumerate(starts):
        first = max(start, n - rows)
        if first == n:
            continue
        q, k, v = (x[b : b + 1, :, first - n :] for x in (query, key, value))
        own, log_sum = _flash(q, *(x.repeat_interleave(hq // hkv, 1) for x in (k, v)), 0.0, True, scale=scaling)
        if start < first:
            earlier = (x[b : b + 1, :, start:first] for x in (key, value))
            found, before = _flash(q.reshape(1, hkv, -1, dim), *earlier, 0.0, False, scale=scaling)
            share = torch.sigmoid(before.reshape(log_sum.shape) - log_sum)[..., None]
            own = torch.lerp(own.float(), found.reshape(own.shape).float(), share)
        out[b, first - n :] = own[0].transpose(0, 1)
    return out


def attend_densely(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> Output:  # fmt: skip
    """Attend to all visible tokens: long decode steps on the CPU with our kernel, all other calls as the model does.

    Args: those of `interface.attention`.
    """
    name, starts = module.config._attn_implementation, None
    if query.shape[2] > MOST_ROWS and name == NAMES["sdpa"] and not _asks_for_more(module, dropout, kwargs):
        starts = _starts(query, key, value, mask)
    if starts is not None and kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        return attend_in_parts(query, key, value, scaling, starts), None
    if key.shape[2] < OWN_FROM.get(key.dtype, 256) and mask is None and query.shape[2] == 1:
        if name == NAMES["sdpa"] and kwargs.keys() <= IGNORED_KEYWORDS:
            return attend_by_torch(query, key, value, dropout, scaling), None
    elif _is_ours(query, key, value, mask, name in EAGER) and not _asks_for_more(module, dropout, kwargs):
        factor, softcap, sinks = scaling, kwargs.get("softcap"), kwargs.get("s_aux")
        factor = float(query.shape[3] ** -0.5 if factor is None else factor)
        if name in EAGER or (softcap is None and sinks is None):  # torch's own attention supports neither
            interval = None if mask is None else mask[:, 0]
            given = query, key, value, factor, interval
            if query.shape[2] <= MOST_ROWS:
                return attend_all(*given, softcap=softcap, sinks=sinks), None
            fraction = module.__dict__.get(PROMPT_FRACTION) if key.shape[2] >= SPARSE_FROM else None
            return attend_rows(*given, softcap=softcap, sinks=sinks, fraction=fraction), None
    given = as_mask(mask, query, key, name)
    return dense_attention(module)(module, query, key, value, given, scaling=scaling, dropout=dropout, **kwargs)


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
    if name == NAMES[FLASH]:
        return torch.arange(n, device=interval.device) >= interval[:, -1, :1]
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


# ---- Prompts ---------------------------------------------------------------------------------------------------------


def own_prompts(model: PreTrainedModel) -> bool:
    """Whether our kernel attends in prompts of a model."""
    return model.device.type == "cpu" and model.dtype == torch.bfloat16 and supported()


def suits_chunks(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Whether a prompt in chunks gives the same, and takes no longer than at once.

    Some recurrent layers begin anew with each call of several tokens, and some kinds of RoPE turn keys by the length of
    the text so far. A model's own eager attention also computes what masks hide.
    """
    config, recurrent = cast(Any, text_decoder(model).config), LinearAttentionCacheLayerMixin
    if model.device.type != "cpu" or rope_kinds(config) & {"dynamic", "longrope"}:
        return False
    if any(isinstance(layer, recurrent) for layer in cache.layers):
        return False
    return own_prompts(model) or config._attn_implementation in ("sdpa", NAMES["sdpa"])


def feed_in_chunks(model: PreTrainedModel) -> Callable[[], None]:
    """Make `generate` split prompts of more than CHUNK tokens on a CPU, unless the caller gives a size.

    Prompts of more than text, or whose hidden states are wanted, and other caches than a DynamicCache, stay whole.

    Returns: a function that undoes it.
    """
    own, kind = cast(Callable[[], PreTrainedModel], weakref.ref(model)), type(model)

    def prefill(input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **how: Any) -> Any:
        cache = model_kwargs.get("past_key_values")
        text = type(cache) is DynamicCache and {n for n, x in model_kwargs.items() if x is not None} <= _OF_TEXT
        given = generation_config
        whole = given.prefill_chunk_size is not None or given.output_hidden_states or given.output_attentions
        if text and input_ids.shape[1] > CHUNK and not whole and suits_chunks(own(), cast(DynamicCache, cache)):
            generation_config = copy.copy(generation_config)
            generation_config.prefill_chunk_size = CHUNK
        tokens = input_ids.shape[1]  # and those of the answer, unless they may be very many
        before = coming.set(min(generation_config.max_length or tokens, tokens + tokens // 8) if text else 0)
        try:
            return getattr(kind, _PREFILL)(own(), input_ids, generation_config, model_kwargs, *args, **how)
        finally:
            coming.reset(before)

    def undo() -> None:
        if vars(model).get(_PREFILL) is prefill:
            delattr(model, _PREFILL)

    if hasattr(kind, _PREFILL) and not getattr(model.config, "is_encoder_decoder", False):
        setattr(model, _PREFILL, prefill)
    return undo


def require_sparse_prompts(model: PreTrainedModel) -> None:
    """Raise ValueError if the kernel of sparse prompts does not support the model's device, dtype or processor."""
    place = "a CPU without it" if model.device.type == "cpu" and not supported() else f"device {model.device}"
    if not own_prompts(model):
        raise ValueError(
            f"sparse prompts need a model in bfloat16 on a CPU with AVX512_BF16, got {model.dtype} on {place}; leave "
            "`prompt` out"
        )


def mark_sparse(modules: Mapping[int, Attention]) -> Callable[[], None]:
    """Make the prompts of these attention modules sparse. Returns: a function that undoes it."""
    for found in modules.values():
        vars(found.module)[PROMPT_FRACTION] = FRACTION

    def undo() -> None:
        for found in modules.values():
            vars(found.module).pop(PROMPT_FRACTION, None)

    return undo
