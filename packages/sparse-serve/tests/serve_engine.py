"""Stand-ins for vLLM's modules, cache specs, layers and CPU kernels."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import torch

SIZE, HEADS, DIM = 32, 2, 16
MODULES = ["vllm", "vllm._custom_ops", "vllm.config", "vllm.model_executor", "vllm.model_executor.models"]
MODULES += ["vllm.model_executor.models.utils", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"]
MODULES += ["vllm.v1.attention.backends.cpu_attn", "vllm.v1.kv_cache_interface"]


@dataclass(frozen=True)
class Spec:
    """A cache spec of vLLM, as far as it is used."""

    block_size: int = SIZE
    num_kv_heads: int = HEADS
    head_size: int = DIM
    head_size_v: int = DIM
    page_size_padded: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    @property
    def unpadded_page_size_bytes(self):
        return 4 * self.block_size * self.num_kv_heads * (self.head_size + self.head_size_v)

    @property
    def page_size_bytes(self):
        return self.page_size_padded or self.unpadded_page_size_bytes


class FullAttentionSpec(Spec):
    """Ordinary full attention."""


class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention that is something else, too."""


class ChunkedLocalAttentionSpec(Spec):
    """Attention within chunks, as in Llama 4; its layers are built like those of full attention."""


def halves(cache):
    """Return the key and value parts of pages [M, H, S, 2 D]."""
    pages, heads, size, _ = cache.shape
    return cache.view(pages, heads, 2 * size, -1).chunk(2, dim=2)


def reshape_and_cache(k, v, keys, values, slots, isa, **how):
    """Write tokens as vLLM's kernels do: keys by columns, values by pairs of tokens."""
    size, dim = keys.shape[2:]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, at = divmod(slot, size)
            keys[page].view(-1, dim, size)[:, :, at] = k[token]
            values[page].view(-1, size // 2, dim, 2)[:, at // 2, :, at % 2] = v[token]


def attention(query, keys, values, output, starts, lengths, blocks, scale):
    """Attend to pages in that layout. Tokens after the last have weight 0, but are multiplied, as by vLLM's kernels."""
    size, dim = keys.shape[2:]
    for row, n in enumerate(lengths.tolist()):
        pages = blocks[row, : -(-n // size)].long()
        k = keys[pages].view(len(pages), -1, dim, size).transpose(2, 3).transpose(0, 1).flatten(1, 2)
        v = values[pages].view(len(pages), -1, size // 2, dim, 2).transpose(3, 4).transpose(0, 1)
        q = query[starts[row] : starts[row + 1]].transpose(0, 1)
        seen = torch.arange(k.shape[1]) <= torch.arange(n - q.shape[1], n)[:, None]
        logits = (q @ k.repeat_interleave(len(q) // len(k), 0).transpose(1, 2)) * scale
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        found = weights @ v.flatten(1, 3).view(len(k), -1, dim).repeat_interleave(len(q) // len(k), 0)
        output[starts[row] : starts[row + 1]] = found.transpose(0, 1)


def attention_with_kv_cache(
    query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, block_table, **how
):
    attention(query, key_cache, value_cache, output, query_start_loc, seq_lens, block_table, scale)


class Impl:
    """vLLM's attention: records what it is called for."""

    def __init__(self, sliding_window=None, alibi_slopes=None, shares=None):
        self.num_heads, self.head_size, self.scale, self.logits_soft_cap = 2 * HEADS, DIM, 0.25, 0.0
        self.sliding_window = -1 if sliding_window is None else sliding_window
        self.attn_type, self.alibi_slopes, self.sinks = "decoder", alibi_slopes, None
        self.kv_sharing_target_layer_name, self.calls = shares, []

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        self.calls.append("update")
        reshape_and_cache(key, value, *halves(kv_cache), slot_mapping, "vec")

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, **more):
        self.calls.append("forward")
        keys, values = halves(kv_cache)
        rows = attn_metadata.query_start_loc, attn_metadata.seq_lens, attn_metadata.block_table
        attention(query.view(-1, self.num_heads, self.head_size), keys, values, output, *rows, self.scale)
        return output


class Builder:
    """vLLM's builder of metadata."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.block_size = kv_cache_spec, kv_cache_spec.block_size

    def build(self, common_prefix_len, common, fast_build=False):
        return common


class Compilation:
    """The compilation config of an engine, which holds its layers."""

    def __init__(self):
        self.static_forward_context = {}


class Config:
    """The config of an engine."""

    def __init__(self, asked):
        self.additional_config = asked
        self.compilation_config = Compilation()
        self.parallel_config = SimpleNamespace(tensor_parallel_size=1)
        self.model_config = SimpleNamespace(max_model_len=256)


def engine(backend, asked, layers):
    """Create an engine's layers as vLLM does: all layers, then their specs, then a builder for each spec."""
    config = sys.modules["vllm.config"].current = Config(asked)
    for index, (_, options) in enumerate(layers):
        impl = backend.SpotlightImpl(**options)
        config.compilation_config.static_forward_context[str(index)] = SimpleNamespace(impl=impl)
    specs = [backend.SpotlightBackend.customize_spec(spec) for spec, _ in layers]
    return config, specs


def built(backend, config, specs):
    device = torch.device("cpu")
    return [backend.SpotlightBuilder(spec, [str(index)], config, device) for index, spec in enumerate(specs)]


def impls(config):
    return [layer.impl for layer in config.compilation_config.static_forward_context.values()]
