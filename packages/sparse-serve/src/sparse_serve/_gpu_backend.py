"""vLLM's FlashAttention, with sparse decode steps in the configured layers, on CUDA. It has never run on a GPU.

Only vLLM imports this module, by its path. The builder of a group of layers decides which are sparse: those of ordinary
full attention, except the dense ones. All others use vLLM's implementation unchanged. A sparse layer

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
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from sparse_serve.device_batch import DeviceBatch, device_pages
from sparse_serve.served import Served, supports


class SpotlightBuilder(FlashAttentionMetadataBuilder):
    """Decides which layers of a group are sparse, and separates rows that decode from prompts, once per step."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = False  # steps keep the table that they are made with

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)  # vLLM then puts rows of one token first
        served = Served.of(vllm_config)
        self._budget: LayerBudget | None = None
        if served is None or not supports(kv_cache_spec):
            return
        layers = vllm_config.compilation_config.static_forward_context
        for impl, name in ((layers[name].impl, name) for name in layer_names):
            if impl.sliding_window == (-1, -1) and impl.serve(served, extract_layer_index(name), kv_cache_spec):
                self._budget = served.budget

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self._budget is not None:
            found.spotlight = self._split(found, common_attn_metadata, common_attn_metadata.max_seq_len)
        return found

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        found = super().build_for_cudagraph_capture(common_attn_metadata)
        if self._budget is not None:  # replays have longer contexts than what is captured
            found.spotlight = self._split(found, common_attn_metadata, self.model_config.max_model_len)
        return found

    def _split(self, found: Any, common: Any, longest: int) -> DeviceBatch:
        if found.causal is not True:
            raise ValueError("spotlight needs causal attention, got a step that is not; serve without it")
        decodes, _, tokens, _ = split_decodes_and_prefills(common, decode_threshold=1)
        prompts = None
        if tokens < common.num_actual_tokens:
            # fast_build: without the schedule of FlashAttention 3, whose buffer has that of the whole step.
            prompts = super().build(0, _after(common, decodes, tokens), fast_build=True)
        tables = common.block_table_tensor, common.seq_lens
        most = tables[0].shape[1] * self.block_size
        return DeviceBatch(
            *tables, tokens, min(longest, most), self.block_size, cast(LayerBudget, self._budget), prompts
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


class SpotlightImpl(FlashAttentionImpl):
    """The attention of one layer: vLLM's own, unless its builder calls `serve`."""

    supports_dcp = False
    supports_pcp = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Served.latest = Served.of(get_current_vllm_config())
        self._paged: Any = None
        self._words = 0
        self._known: tuple[Any, Any] = (None, None)

    def serve(self, served: Served, index: int, spec: Any) -> bool:
        """Make this layer sparse, unless it is one of the engine's dense layers; return whether it is.

        Raises: ValueError if it does what sparse layers do not support.
        """
        if index in served.dense_layers:
            return False
        if spec.block_size & (spec.block_size - 1):
            raise ValueError(
                f"spotlight needs pages of a power of two of tokens on a GPU, got {spec.block_size}; set block_size to "
                "16 or 32, or serve without it"
            )
        require(torch.device("cuda"), spec.dtype, (spec.head_size,), self.num_queries_per_kv)
        if self._paged is None:
            self._paged = served.layer(index, self)
            self._words = served.hasher.config.bits // 32
        return True

    def _pages(self, cache: Tensor) -> Any:
        """View the cache as pages; the views are kept, because making them takes longer than a launch."""
        if self._known[0] is not cache:
            self._known = cache, device_pages(cache, self._words)
        return self._known[1]

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self._paged is not None:
            codes = self._paged.encode(key[: len(slot_mapping)])
            paged_cuda.write_codes(self._pages(kv_cache), slot_mapping, codes)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        if attn_metadata is None or self._paged is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output=output, **scales)
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("spotlight does not support outputs that are quantised by attention; disable that fusion")
        batch: DeviceBatch = attn_metadata.spotlight
        n = batch.decodes
        if batch.prompts is not None:
            rest = query[n:], key[n:], value[n:], kv_cache, batch.prompts
            super().forward(layer, *rest, output=output[n:])
        if n:
            q, out = (x[:n].view(n, self.num_heads, self.head_size) for x in (query, output))
            out.copy_(paged_cuda.decode(self._paged, q, self._pages(kv_cache), batch.step()))
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
