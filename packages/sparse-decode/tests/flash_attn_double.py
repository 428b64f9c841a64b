"""What flash-attn 2.8 takes and returns, without its kernels: names, layouts and strides are checked; SDPA inside."""

import sys
import types
from importlib.machinery import ModuleSpec

import torch
from torch.nn.functional import scaled_dot_product_attention

DTYPES = [torch.bfloat16, torch.float16]


def _check(q, k, v, dropout_p):
    assert dropout_p == 0.0
    assert q.dim() == k.dim() == v.dim() == 4, "[B, S, H, D]"
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in DTYPES
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "contiguous last dimension"
    assert q.shape[0] == k.shape[0] == v.shape[0]
    assert k.shape == v.shape
    assert q.shape[3] == k.shape[3] <= 256
    assert q.shape[3] % 8 == 0
    assert q.shape[2] % k.shape[2] == 0


def _attend(q, k, v, shown, scale, softcap):
    """Attend where `shown` [.., Sq, Sk]; rows that see nothing are zero."""
    group = q.shape[2] // k.shape[2]
    queries, keys, values = (x.float().transpose(1, 2) for x in (q, k, v))
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if softcap:
        bias = softcap * torch.tanh(queries @ keys.mT * scale / softcap)
        queries = torch.zeros_like(queries)
    else:
        bias = torch.zeros(1)
    bias = bias.expand(*queries.shape[:3], keys.shape[2]).masked_fill(~shown, -torch.inf)
    out = scaled_dot_product_attention(queries, keys, values, bias, scale=scale)
    return out.masked_fill(~shown.any(-1, keepdim=True), 0).transpose(1, 2).to(q.dtype)


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    _check(q, k, v, dropout_p)
    assert window_size == (-1, -1)
    assert alibi_slopes is None
    assert not return_attn_probs
    shown = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    return _attend(q, k, v, shown.tril(k.shape[1] - q.shape[1]) if causal else shown, softmax_scale, softcap)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    _check(q, k_cache, v_cache, 0.0)
    unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table, alibi_slopes)
    assert all(x is None for x in unused)
    assert window_size == (-1, -1)
    assert not causal
    assert not return_softmax_lse
    assert cache_seqlens.dtype == torch.int32
    assert cache_seqlens.shape == (q.shape[0],)
    assert cache_seqlens.is_contiguous()
    assert int(cache_seqlens.max()) <= k_cache.shape[1]
    shown = torch.arange(k_cache.shape[1]) < cache_seqlens[:, None, None, None]
    return _attend(q, k_cache, v_cache, shown, softmax_scale, softcap)


def install(monkeypatch):
    """Let `import flash_attn` find this, and models on the CPU use it."""
    module = types.ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.flash_attn_func, module.flash_attn_with_kvcache = flash_attn_func, flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr("sparse_decode.attention.flash.DEVICES", ("cuda", "cpu"))
    return module
