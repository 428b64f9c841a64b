"""vLLM's CPU attention, with sparse decode steps in the configured layers.

Only vLLM imports this module, by its path. Layers that are dense, or that do not attend to the whole context, use
vLLM's implementation unchanged. A sparse layer

1. writes keys and values row by row, and codes to the tail of each page (`sparse_decode.paged`); vLLM's kernel stores
   keys column by column, so that single tokens cannot be read;
2. attends in prompts, whole or chunked, with vLLM's kernel, on a copy of their pages in its layout;
3. attends in decode rows with `sparse_decode.paged`, in place.
"""

# vLLM is no dependency of this package, and has few types.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from sparse_serve.batch import Batch
from sparse_serve.served import Served


class SpotlightBuilder(CPUAttentionMetadataBuilder):
    """Separates prompts from decode rows, once per step for all layers."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        served = Served.of(self.vllm_config)
        if served is not None and isinstance(self.kv_cache_spec, FullAttentionSpec):
            found.spotlight = Batch.of(
                found, self.block_size, common_attn_metadata.is_prefilling, served.budget, self._schedule
            )
        return found

    def _schedule(self, starts: Tensor, lengths: Tensor) -> Any:
        """Return the scheduler metadata of vLLM's kernel for a subset of the rows."""
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=False,
            kv_cache_dtype=self.kv_cache_dtype,
        )


class SpotlightImpl(CPUAttentionBackendImpl):
    """The attention of one layer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        config = get_current_vllm_config()
        Served.latest = served = Served.of(config)
        full = self.attn_type == AttentionType.DECODER and self.sliding_window == -1
        self._served: Served | None = served if full else None
        self._paged: Any = None
        if self._served is None:
            return
        if self.alibi_slopes is not None:
            raise ValueError("spotlight does not support attention biases, got a model with ALiBi; serve without it")
        if self.kv_sharing_target_layer_name is not None:
            raise ValueError("spotlight does not support layers that share keys; serve without it")

    def _layer(self, layer: Any) -> Any:
        """Return the `PagedLayer` that decodes this layer; None if vLLM does."""
        if self._served is None or self.attn_type != AttentionType.DECODER:
            return None
        if self._paged is None:
            softcap = float(self.logits_soft_cap) or None
            sinks = None if self.sinks is None else self.sinks.float()
            index = extract_layer_index(layer.layer_name)
            self._paged = self._served.layer(index, self.scale, softcap, sinks) or False
        return self._paged or None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        paged = self._layer(layer)
        if paged is None:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        tokens = len(slot_mapping)
        served = cast(Served, self._served)
        k, v = key[:tokens], value[:tokens]
        served.pages(kv_cache).write(slot_mapping.long(), k, v, paged.encode(k))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        paged = self._layer(layer)
        if attn_metadata is None or paged is None:
            scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output=output, **scales)
        batch: Batch = attn_metadata.spotlight
        q, out = (x.view(-1, self.num_heads, self.head_size) for x in (query, output))
        pages = cast(Served, self._served).pages(kv_cache)
        if batch.prompts is not None:
            self._prefill(layer, q, out, pages, batch)
        if len(batch.rows):
            step = batch.step(len(pages.k), pages.k.shape[2])
            out[batch.rows] = paged.decode(q[batch.rows], pages, step)
        return output

    def _prefill(self, layer: Any, q: Tensor, out: Tensor, pages: Any, batch: Batch) -> None:
        """Attend in prompts with vLLM's kernel; bit for bit the result without the plug-in."""
        prompts = batch.prompts
        assert prompts is not None
        k, v = prompts.gather(pages.k, pages.v)
        heads, size, dim = pages.k.shape[1:]
        cache = k.new_zeros(prompts.pages, heads, 2 * size, dim)
        keys, values = cache.chunk(2, dim=2)
        how = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float, "kv_cache_dtype": self.kv_cache_dtype}
        ops.cpu_attn_reshape_and_cache(k, v, keys, values, prompts.slots, layer.isa, **how)
        rows = prompts.rows
        found = torch.empty_like(out[rows]) if not isinstance(rows, slice) else out[rows]
        ops.cpu_attention_with_kv_cache(
            query=q[rows],
            key_cache=keys,
            value_cache=values,
            output=found,
            query_start_loc=prompts.starts,
            seq_lens=prompts.lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=self.sliding_window,
            block_table=prompts.blocks,
            softcap=self.logits_soft_cap,
            scheduler_metadata=prompts.schedule,
            s_aux=None if self.sinks is None else self.sinks.float(),
            **how,
        )
        if not isinstance(rows, slice):
            out[rows] = found


class SpotlightBackend(CPUAttentionBackend):
    """vLLM's CPU attention backend, with sparse attention in the configured layers."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Enlarge each page to make room for codes in its tail."""
        served = Served.latest
        if served is None or type(spec) is not FullAttentionSpec or spec.page_size_padded is not None:
            return spec
        others = spec.unpadded_page_size_bytes
        return replace(spec, page_size_padded=others + served.tail_bytes(spec.block_size, spec.num_kv_heads, others))

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return SpotlightImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return SpotlightBuilder
