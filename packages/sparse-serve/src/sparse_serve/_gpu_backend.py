"""vLLM's FlashAttention, with sparse decode steps in the configured layers, on CUDA. It has never run on a GPU.

Only vLLM imports this module, by its path. A sparse layer

1. writes keys and values as vLLM does, and codes to the tail of each page (`sparse_decode.cuda.pages`);
2. attends in prompts, whole or chunked, with FlashAttention;
3. attends in rows of one token with `sparse_decode.cuda.pages`, in place.

A batch of such rows alone can be a CUDA graph: everything that depends on lengths and tables is computed on the device,
by the first sparse layer of the step. A graph cannot tell a prompt's last token, alone in its chunk, from a decode
step. So here every row of one token counts as a decode step, in a graph or not.
"""

# vLLM is no dependency of this package, and has few types.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from sparse_decode.budget import LayerBudget
from sparse_decode.cuda import pages as paged_cuda
from sparse_decode.inputs import require
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from sparse_serve._shared import QUANTISED, SparseBuilder, SparseImpl
from sparse_serve.device_batch import DeviceBatch
from sparse_serve.served import Served


class SpotlightBuilder(SparseBuilder, FlashAttentionMetadataBuilder):
    """Separates rows that decode from prompts, once per step."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = False  # steps keep the table that they are made with

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._init_reorder_batch_threshold(1)  # vLLM then puts rows of one token first
        self._searched = False

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        found = super().build_for_cudagraph_capture(common_attn_metadata)
        if self.budget is not None:  # replays have longer contexts than what is captured
            found.spotlight = self.split(found, common_attn_metadata, self.model_config.max_model_len)
        return found

    def split(self, found: Any, common: Any, longest: int) -> DeviceBatch:
        decodes, _, tokens, _ = split_decodes_and_prefills(common, decode_threshold=1)
        prompts = None
        if tokens < common.num_actual_tokens:
            # fast_build: without the schedule of FlashAttention 3, whose buffer has that of the whole step.
            given = 0, _after(common, decodes, tokens)
            prompts = FlashAttentionMetadataBuilder.build(self, *given, fast_build=True)
        tables = common.block_table_tensor, common.seq_lens
        most = tables[0].shape[1] * self.block_size
        # The first decode rows search whatever their length: a search loads its kernels, which no capture could.
        longest, self._searched = longest if self._searched else most, self._searched or tokens > 0
        return DeviceBatch(
            *tables, tokens, min(longest, most), self.block_size, cast(LayerBudget, self.budget), prompts
        )


def _after(common: Any, rows: int, tokens: int) -> Any:
    """Return a step's metadata without its first rows, which have one token each."""
    if not rows:
        return common
    names = ("seq_lens", "block_table_tensor", "is_prefilling", "seq_lens_cpu_upper_bound")
    parts = {name: x[rows:] for name in names if (x := getattr(common, name)) is not None}
    for name in ("query_start_loc", "query_start_loc_cpu"):
        parts[name] = getattr(common, name)[rows:] - tokens
    counts = {"num_reqs": common.num_reqs - rows, "num_actual_tokens": common.num_actual_tokens - tokens}
    return replace(common, slot_mapping=common.slot_mapping[tokens:], **counts, **parts)


class SpotlightImpl(SparseImpl, FlashAttentionImpl):
    """The attention of one layer."""

    supports_dcp = False
    supports_pcp = False

    def require(self, spec: Any) -> None:
        if spec.block_size & (spec.block_size - 1):
            raise ValueError(
                f"spotlight needs pages of a power of two of tokens on a GPU, got {spec.block_size}; set block_size to "
                "16 or 32, or serve without it"
            )
        require(torch.device("cuda"), spec.dtype, (spec.head_size,), self.num_queries_per_kv)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self.paged is not None:
            codes = self.paged.encode(key[: len(slot_mapping)])
            paged_cuda.OPERATORS.place_codes(codes, slot_mapping, self.pages(kv_cache).codes)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        if attn_metadata is None or self.paged is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output=output, **scales)
        if output_scale is not None or output_block_scale is not None:
            raise ValueError(QUANTISED)
        batch: DeviceBatch = attn_metadata.spotlight
        n = batch.decodes
        if batch.prompts is not None:
            rest = query[n:], key[n:], value[n:], kv_cache, batch.prompts
            super().forward(layer, *rest, output=output[n:])
        if n:
            q, out = (x[:n].view(n, self.num_heads, self.head_size) for x in (query, output))
            out.copy_(paged_cuda.decode(self.paged, q, self.pages(kv_cache), batch.step()))
        return output


class SpotlightBackend(FlashAttentionBackend):
    """vLLM's FlashAttention backend, with sparse attention in the configured layers.

    What sparse layers do not support is declined here, so that vLLM names it when it starts.
    """

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Enlarge each page to make room for codes in its tail."""
        return Served.with_room(spec)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 16 == 0 and 16 <= head_size <= 256

    supports_mm_prefix = supports_rswa = supports_non_causal = supports_kv_connector = classmethod(lambda cls: False)

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return SpotlightImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return SpotlightBuilder
