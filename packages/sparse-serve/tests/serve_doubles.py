"""Stand-ins for vLLM's modules, cache specs, layers, CPU kernels and FlashAttention; requests."""

import itertools
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

SIZE, HEADS, QUERIES, DIM, LONGEST = 32, 2, 4, 32, 256
WORDS = 4  # of a code
FLASH = "vllm.v1.attention.backends.flash_attn"
MODULES = ["vllm", "vllm.config", "vllm.model_executor", "vllm.model_executor.models"]
MODULES += ["vllm.model_executor.models.utils", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend", FLASH]
MODULES += ["vllm.v1.attention.backends", "vllm.v1.attention.backends.cpu_attn", "vllm.v1.attention.backends.utils"]
MODULES += ["vllm.v1.kv_cache_interface"]


@dataclass(frozen=True)
class Spec:
    """A cache spec of vLLM, as far as it is used."""

    block_size: int = SIZE
    num_kv_heads: int = HEADS
    head_size: int = DIM
    head_size_v: int = DIM
    dtype: torch.dtype = torch.float32
    page_size_padded: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    @property
    def unpadded_page_size_bytes(self):
        return self.dtype.itemsize * self.block_size * self.num_kv_heads * (self.head_size + self.head_size_v)

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


def reshape_and_cache(k, v, keys, values, slots):
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


class Impl:
    """vLLM's attention: records what it is called for."""

    def __init__(self, sliding_window=None, alibi_slopes=None, shares=None):
        self.num_heads, self.head_size, self.scale, self.logits_soft_cap = QUERIES, DIM, 0.25, 0.0
        self.sliding_window = -1 if sliding_window is None else sliding_window
        self.attn_type, self.alibi_slopes, self.sinks = "decoder", alibi_slopes, None
        self.kv_sharing_target_layer_name, self.calls = shares, []

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        self.calls.append("update")
        reshape_and_cache(key, value, *halves(kv_cache), slot_mapping)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, **more):
        self.calls.append("forward")
        keys, values = halves(kv_cache)
        rows = attn_metadata.query_start_loc, attn_metadata.seq_lens, attn_metadata.block_table
        attention(query.view(-1, self.num_heads, self.head_size), keys, values, output, *rows, self.scale)
        return output


class Builder:
    """vLLM's builder of metadata."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.block_size = kv_cache_spec.block_size

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
        self.model_config = SimpleNamespace(max_model_len=LONGEST)


@dataclass
class Common:
    """What vLLM says of a step."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    is_prefilling: Any = None
    seq_lens_cpu_upper_bound: Any = None

    @property
    def block_table(self):  # as the CPU's metadata call it
        return self.block_table_tensor


class FlashImpl:
    """FlashAttention: dense attention of each token, by its row's table."""

    def __init__(self, sliding_window=(-1, -1), alibi_slopes=None, shares=None):
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = QUERIES, HEADS, DIM, DIM**-0.5
        self.num_queries_per_kv, self.logits_soft_cap, self.sinks = QUERIES // HEADS, 0, None
        self.sliding_window, self.alibi_slopes, self.kv_sharing_target_layer_name = sliding_window, alibi_slopes, shares
        self.forwarded = []

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        for at, slot in enumerate([] if kv_cache.is_cuda else slot_mapping.tolist()):
            if slot >= 0:
                kv_cache[slot // SIZE, :, slot % SIZE] = torch.cat([key[at], value[at]], -1)

    def forward(self, layer, query, key, value, kv_cache, metadata, output, output_scale=None, output_block_scale=None):
        self.forwarded.append(metadata.num_actual_tokens)
        starts = metadata.query_start_loc.tolist()
        for row, (first, end) in enumerate(itertools.pairwise(starts)):
            length = int(metadata.seq_lens[row])
            for at in range(first, end):
                seen = torch.arange(length - (end - 1 - at))
                pages = metadata.block_table_tensor[row].long()[seen // SIZE]
                k, v = kv_cache[pages, :, seen % SIZE].float().transpose(0, 1).chunk(2, -1)
                q = query[at].float().view(HEADS, -1, DIM)
                output[at] = (((q @ k.mT) * self.scale).softmax(-1) @ v).view(QUERIES, DIM).to(output.dtype)
        return output


class FlashBuilder:
    """FlashAttention's builder of metadata, which is the step itself here."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.block_size, self.model_config, self.built = kv_cache_spec.block_size, vllm_config.model_config, []

    def _init_reorder_batch_threshold(self, threshold):
        self.reorder_batch_threshold = threshold

    def build(self, common_prefix_len, common, fast_build=False):
        self.built.append(fast_build)
        return replace(common)

    def build_for_cudagraph_capture(self, common):
        return self.build(0, common)


def split(common, decode_threshold):
    lengths = common.query_start_loc_cpu.diff()
    rows = int((lengths > decode_threshold).int().argmax()) if common.max_query_len > 1 else common.num_reqs
    return rows, common.num_reqs - rows, int(common.query_start_loc_cpu[rows]), -1


def pool(spec, pages=40, tokens_first=False, device=None):
    """A layer's cache [M, H, S, 2 D] in pages of a spec, NaN everywhere."""
    item, page = 2, spec.page_size_padded or spec.unpadded_page_size_bytes
    memory = torch.full((pages, page // item), torch.nan, dtype=torch.bfloat16, device=device)
    inside = memory[:, : spec.unpadded_page_size_bytes // item]
    if tokens_first:  # vLLM's LBNHC
        return inside.view(pages, SIZE, HEADS, 2 * DIM).transpose(1, 2)
    return inside.view(pages, HEADS, SIZE, 2 * DIM)


class Requests:
    """Requests of a length each, in shuffled pages; `prompts`: the length of the prompts of those that were begun."""

    def __init__(self, seed=0, pages=40, dtype=torch.bfloat16):
        self.draw, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.free = torch.randperm(pages - 1, generator=self.draw).add(1).tolist()
        self.lengths, self.tables, self.prompts = {}, {}, {}

    def begin(self, name, prompt, prefix=None):
        """Begin a request, with the whole pages of another one as its prefix."""
        whole = 0 if prefix is None else min(self.lengths[prefix] // SIZE, (prompt - 1) // SIZE)
        self.lengths[name], self.prompts[name] = whole * SIZE, prompt
        self.tables[name] = self.tables.get(prefix, [])[:whole]

    def end(self, name):
        """End a request; return the pages that no other one has."""
        gone = set(self.tables.pop(name)) - {page for table in self.tables.values() for page in table}
        del self.lengths[name], self.prompts[name]
        self.free += gone
        return gone

    def slots(self, name):
        """Return where the tokens of a request lie."""
        at = torch.arange(self.lengths[name])
        return torch.tensor(self.tables[name])[at // SIZE] * SIZE + at % SIZE

    def step(self, tokens):
        """Compute some tokens of each request: the step's metadata, queries, keys and values."""
        said = torch.tensor([self.lengths.get(name, 0) < self.prompts.get(name, 0) for name in tokens])
        for name, count in tokens.items():
            self.lengths[name] = self.lengths.get(name, 0) + count
            table = self.tables.setdefault(name, [])
            table += [self.free.pop() for _ in range(-(-self.lengths[name] // SIZE) - len(table))]
        counts = torch.tensor(list(tokens.values()))
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
        lengths = torch.tensor([self.lengths[name] for name in tokens], dtype=torch.int32)
        blocks = torch.full((len(tokens), LONGEST // SIZE), -7, dtype=torch.int32)
        for row, name in enumerate(tokens):
            blocks[row, : len(self.tables[name])] = torch.tensor(self.tables[name])
        slots = torch.cat([self.slots(name)[self.lengths[name] - count :] for name, count in tokens.items()])
        total, sizes = int(counts.sum()), (int(counts.max()), int(lengths.max()))
        common = Common(starts, starts, lengths, len(tokens), total, *sizes, blocks, slots)
        common.is_prefilling = said if self.prompts else None
        shapes = (QUERIES, HEADS, HEADS)
        return common, [torch.randn(total, n, DIM, generator=self.draw).to(self.dtype) for n in shapes]


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
