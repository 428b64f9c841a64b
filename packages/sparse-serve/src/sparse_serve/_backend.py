"""vLLM's CPU attention, with sparse decode steps in the configured layers.

Only vLLM imports this module, by its path. A sparse layer

1. writes keys and values token by token, and codes to the tail of each page (`sparse_decode.pages`): vLLM's kernel
   stores keys column by column or in tiles, so that single tokens cannot be read;
2. attends in prompts with vLLM's kernel, on a copy of their pages in its layout;
3. attends in rows that decode with `sparse_decode.pages`, in place.
"""

# vLLM is no dependency of this package, and has few types.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from dataclasses import replace
from typing import Any, cast

import torch
from sparse_decode.budget import LayerBudget
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from sparse_serve._shared import QUANTISED, SparseBuilder, SparseImpl
from sparse_serve.batch import Batch, Prompts
from sparse_serve.served import Served


class SpotlightBuilder(SparseBuilder, CPUAttentionMetadataBuilder):
    """Separates prompts from decode rows, once per step for all layers."""

    def split(self, found: Any, common: Any, longest: int) -> Batch:
        batch = Batch(found, self.block_size, common.is_prefilling, cast(LayerBudget, self.budget))
        if (own := batch.prompts) is not None:
            counts = {"num_reqs": len(own.lengths), "num_actual_tokens": len(own.rows)}
            starts = {"query_start_loc": own.starts, "query_start_loc_cpu": own.starts}
            pages = {"seq_lens": own.lengths, "block_table_tensor": own.blocks, "slot_mapping": own.slots}
            own.metadata = CPUAttentionMetadataBuilder.build(self, 0, replace(common, **counts, **starts, **pages))
        return batch


class SpotlightImpl(SparseImpl, CPUAttentionBackendImpl):
    """The attention of one layer."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.paged is None:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        key, value = key[: len(slot_mapping)], value[: len(slot_mapping)]
        self.pages(kv_cache).write(slot_mapping.long(), key, value, self.paged.encode(key))

    def forward(
        self, layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if attn_metadata is None or self.paged is None:
            scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output=output, **scales)
        if output_scale is not None or output_block_scale is not None:
            raise ValueError(QUANTISED)
        q, out = (x.view(-1, self.num_heads, self.head_size) for x in (query, output))
        pages, batch = self.pages(kv_cache), cast(Batch, attn_metadata.spotlight)
        if batch.prompts is not None:
            self._prefill(layer, q, out, pages, batch.prompts)
        if len(batch.rows):
            step = batch.step(len(pages.k), pages.k.shape[2])
            out[batch.rows] = self.paged.decode(q[batch.rows], pages, step)
        return output

    def _prefill(self, layer: Any, q: Tensor, out: Tensor, pages: Any, prompts: Prompts) -> None:
        """Attend in prompts; bit for bit the result without the plug-in."""
        k, v, copy = prompts.copied(pages)
        super().do_kv_cache_update(layer, k, v, copy, prompts.slots)
        found = torch.empty_like(own := q[prompts.rows])
        super().forward(layer, own, None, None, copy, prompts.metadata, output=found)
        out[prompts.rows] = found


class SpotlightBackend(CPUAttentionBackend):
    """vLLM's CPU attention backend, with sparse attention in the configured layers."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Enlarge each page to make room for codes in its tail."""
        return Served.with_room(spec)

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return SpotlightImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return SpotlightBuilder
