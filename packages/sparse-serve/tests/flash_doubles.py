"""Stand-ins for vLLM's FlashAttention, and requests."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import serve_engine
import torch

SIZE, HEADS, QUERIES, DIM, LONGEST = 16, 2, 4, 32, 256


@dataclass(frozen=True)
class Spec(serve_engine.Spec):
    """A cache spec of vLLM, as far as it is used."""

    block_size: int = SIZE
    num_kv_heads: int = HEADS
    head_size: int = DIM
    head_size_v: int = DIM
    dtype: torch.dtype = torch.bfloat16

    @property
    def unpadded_page_size_bytes(self):
        return 2 * self.block_size * self.num_kv_heads * (self.head_size + self.head_size_v)


class FullAttentionSpec(Spec):
    """Ordinary full attention."""


class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention that is something else, too."""


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


class Impl:
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


class Builder:
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


class Backend:
    """FlashAttention's backend."""


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
    """Requests of a length each, in shuffled pages."""

    def __init__(self, seed=0):
        self.draw = torch.Generator().manual_seed(seed)
        self.free = torch.randperm(39, generator=self.draw).add(1).tolist()
        self.lengths, self.tables = {}, {}

    def step(self, tokens):
        """Compute some tokens of each request: the step's metadata, queries, keys and values."""
        for name, count in tokens.items():
            self.lengths[name] = self.lengths.get(name, 0) + count
            table = self.tables.setdefault(name, [])
            table += [self.free.pop() for _ in range(-(-self.lengths[name] // SIZE) - len(table))]
        counts = torch.tensor(list(tokens.values()))
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
        lengths = torch.tensor([self.lengths[name] for name in tokens], dtype=torch.int32)
        blocks = torch.full((len(tokens), LONGEST // SIZE), -7, dtype=torch.int32)
        slots = []
        for row, (name, count) in enumerate(tokens.items()):
            blocks[row, : len(self.tables[name])] = torch.tensor(self.tables[name])
            at = range(self.lengths[name] - count, self.lengths[name])
            slots += [self.tables[name][i // SIZE] * SIZE + i % SIZE for i in at]
        total, most = int(counts.sum()), int(counts.max())
        common = Common(
            starts, starts, lengths, len(tokens), total, most, int(lengths.max()), blocks, torch.tensor(slots)
        )
        shapes = (QUERIES, HEADS, HEADS)
        return common, [torch.randn(total, n, DIM, generator=self.draw).bfloat16() for n in shapes]
