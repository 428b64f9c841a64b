"""vLLM's CPU attention, with sparse decode steps in the configured layers.

Only vLLM imports this module, by its path. The builder of a group of layers decides which are sparse, before the first
request: those of ordinary full attention, except the dense ones. All others use vLLM's implementation unchanged.

In a sparse layer prompts and decode rows below the break-even are vLLM's, too: its kernels write and read their pages.
When a row reaches the break-even, its pages are moved, in place, to a layout by rows, and hashed: codes go to the tail
of each page (`sparse_decode.pages`). From then on, and for all who share these pages,

1. keys and values are written row by row, and hashed; vLLM's kernel stores keys column by column or in tiles, so that
   single tokens cannot be read;
2. prompts are attended to by vLLM's kernel, on a copy of their pages in its layout;
3. decode rows are attended to by `sparse_decode.pages`, in place.
"""

# vLLM is no dependency of this package, and has few types.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

import functools
from typing import Any, cast

import torch
from sparse_decode.budget import LayerBudget
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from sparse_serve.batch import Batch, Part
from sparse_serve.layout import Layout, RowPages
from sparse_serve.served import Served, supports


class SpotlightBuilder(CPUAttentionMetadataBuilder):
    """Decides which layers of a group are sparse, and separates prompts from decode rows, once per step for all."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        served = Served.of(vllm_config)
        self._budget: LayerBudget | None = None
        self._row_pages: RowPages = RowPages()
        if served is None or not supports(kv_cache_spec):
            return
        layers = vllm_config.compilation_config.static_forward_context
        for impl, name in ((layers[name].impl, name) for name in layer_names):
            if impl.sliding_window == -1:
                served.require_room(kv_cache_spec)
                impl.serve(served, extract_layer_index(name))
                self._budget = served.budget

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self._budget is not None:
            if found.causal is not True:
                raise ValueError("spotlight needs causal attention, got a step that is not; serve without it")
            given = self.block_size, common_attn_metadata.is_prefilling, self._budget, self._schedule, self._row_pages
            found.spotlight = Batch.of(found, *given)
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
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self.kv_cache_dtype,
        )


class SpotlightImpl(CPUAttentionBackendImpl):
    """The attention of one layer: vLLM's own, unless its builder calls `serve`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Served.latest = Served.of(get_current_vllm_config())
        self._served: Served | None = None
        self._paged: Any = None
        self._layout: Layout | None = None
        self._seen: int | None = None

    def serve(self, served: Served, index: int) -> None:
        """Make this layer sparse, unless it is one of the engine's dense layers.

        Raises: ValueError if it does what sparse layers do not support.
        """
        if self._served is not served and index not in served.dense_layers:
            self._served, self._paged = served, served.layer(index, self)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Write keys and values, and attend."""
        if attn_metadata is None:
            return output
        batch: Batch | None = None if self._paged is None else attn_metadata.spotlight
        if batch is not None:
            self._prepare(layer, kv_cache, batch)
        if batch is None or batch.plain:
            if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
                self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output=output, **scales)
        q, out = (x.view(-1, self.num_heads, self.head_size) for x in (query, output))
        self._attend(layer, q, cast(Tensor, key), cast(Tensor, value), kv_cache, out, batch)
        return output

    def _prepare(self, layer: Any, kv_cache: Tensor, batch: Batch) -> None:
        """Bring pages to the layouts of a step, and count the tokens that vLLM's kernel reads for decode rows."""
        if self._seen != kv_cache.data_ptr():
            self._seen = cast(Served, self._served).move_to_huge_pages(kv_cache)
        moves = batch.moves
        self._paged.selected += batch.read * self.num_heads
        self._paged.visible += batch.read * self.num_heads
        if len(moves.fresh):  # vLLM's kernel multiplies what a page held before by 0, which NaN survives
            kv_cache[torch.from_numpy(moves.fresh)] = 0
        if len(moves.moved):
            pages, moved = cast(Served, self._served).pages(kv_cache), torch.from_numpy(moves.moved)
            size, dim = pages.k.shape[2:]
            if self._layout is None:
                self._layout = Layout.learn(functools.partial(self._write, layer), size, dim, kv_cache.dtype)
            self._layout.to_rows(pages.k, pages.v, moved)
            self._paged.encode_pages(pages, moved)

    def _write(self, layer: Any, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write tokens in vLLM's layout."""
        ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, layer.isa, **self._how(layer))

    def _how(self, layer: Any) -> dict[str, Any]:
        return {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float, "kv_cache_dtype": self.kv_cache_dtype}

    def _attend(
        self, layer: Any, q: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, out: Tensor, batch: Batch
    ) -> None:
        """Write and attend in a step of which some rows have their pages by rows."""
        pages, paged = cast(Served, self._served).pages(kv_cache), self._paged
        at, slots = batch.written
        k, v = (key, value) if len(at) == len(key) else (key[at], value[at])
        pages.write(slots, k, v, paged.encode(k))
        if (stock := batch.stock) is not None:
            self.do_kv_cache_update(layer, key[: len(stock.slots)], value[: len(stock.slots)], kv_cache, stock.slots)
            count, heads, size, _ = kv_cache.shape
            keys, values = kv_cache.view(count, heads, 2 * size, -1).chunk(2, dim=2)
            self._kernel(layer, q, out, keys, values, stock)
        if batch.prompts is not None:
            self._prefill(layer, q, out, pages, batch.prompts)
        if len(batch.rows):
            step = batch.step(len(pages.k), pages.k.shape[2])
            out[batch.rows] = paged.decode(q[batch.rows], pages, step)

    def _prefill(self, layer: Any, q: Tensor, out: Tensor, pages: Any, prompts: Part) -> None:
        """Attend in prompts whose pages are by rows; bit for bit the result without the plug-in."""
        page, place = cast("tuple[Tensor, Tensor]", prompts.sources)
        k, v = pages.k[page, :, place], pages.v[page, :, place]
        heads, size, dim = pages.k.shape[1:]
        keys, values = k.new_zeros(int(prompts.blocks.max()) + 1, heads, 2 * size, dim).chunk(2, dim=2)
        self._write(layer, k, v, keys, values, prompts.slots)
        self._kernel(layer, q, out, keys, values, prompts)

    def _kernel(self, layer: Any, q: Tensor, out: Tensor, keys: Tensor, values: Tensor, rows: Part) -> None:
        """Call vLLM's kernel for some rows of a step."""
        found = torch.empty_like(out[rows.rows])
        ops.cpu_attention_with_kv_cache(
            query=q[rows.rows],
            key_cache=keys,
            value_cache=values,
            output=found,
            query_start_loc=rows.starts,
            seq_lens=rows.lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=self.sliding_window,
            block_table=rows.blocks,
            softcap=self.logits_soft_cap,
            scheduler_metadata=rows.schedule,
            s_aux=self.sinks if self.sinks is None or self.sinks.dtype == torch.bfloat16 else self.sinks.float(),
            **self._how(layer),
        )
        out[rows.rows] = found


class SpotlightBackend(CPUAttentionBackend):
    """vLLM's CPU attention backend, with sparse attention in the configured layers."""

    # Pages must be in their layout before anything is written; only `forward` knows which.
    forward_includes_kv_cache_update: bool = True

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
