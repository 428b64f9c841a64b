"""What our backends for CPU and GPU add to vLLM's classes in the same way. Only they import this module.

The builder of a group of layers decides which are sparse, before the first request: those of ordinary full attention,
except the dense ones. All others use vLLM's implementation unchanged.
"""

# vLLM is no dependency of this package, and has few types.
# pyright: reportMissingImports=false

from typing import Any

import torch
from sparse_decode.budget import LayerBudget
from sparse_decode.caches.buffer import in_huge_pages
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index

from sparse_serve.layout import pages_of
from sparse_serve.served import Served, supports

QUANTISED = "spotlight does not support outputs that are quantised by attention; disable that fusion"

_NO_WINDOW = (-1, (-1, -1))  # of vLLM's implementations for CPU and GPU


class SparseBuilder:
    """Mixin of builders: makes the layers of its group sparse, and describes each step to them.

    Attributes: budget: of its sparse layers; None if there are none.
    """

    budget: LayerBudget | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # pyright: ignore[reportCallIssue]
        served = Served.of(vllm_config)
        if served is None or not supports(kv_cache_spec):
            return
        layers = vllm_config.compilation_config.static_forward_context
        for impl, name in ((layers[name].impl, name) for name in layer_names):
            if impl.sliding_window in _NO_WINDOW and impl.serve(served, extract_layer_index(name), kv_cache_spec):
                self.budget = served.budget

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return vLLM's metadata of a step, with our `spotlight` if there are sparse layers."""
        found: Any = super().build(common_prefix_len, common_attn_metadata, fast_build)  # pyright: ignore[reportAttributeAccessIssue]
        if self.budget is not None:
            if found.causal is not True:
                raise ValueError("spotlight needs causal attention, got a step that is not; serve without it")
            found.spotlight = self.split(found, common_attn_metadata, common_attn_metadata.max_seq_len)
        return found

    def split(self, found: Any, common: Any, longest: int) -> Any:
        """Separate rows that decode from prompts. Args: longest: upper bound of the visible tokens of decode rows."""
        raise NotImplementedError


class SparseImpl:
    """Mixin of the attention of one layer: vLLM's own, unless its builder calls `serve`.

    Attributes: paged: the `sparse_decode.pages.PagedLayer`; None if the layer is vLLM's.
    """

    paged: Any = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Served.latest = Served.of(get_current_vllm_config())
        self._known: tuple[Any, Any] = (None, None)

    def serve(self, served: Served, index: int, spec: Any) -> bool:
        """Make this layer sparse, unless it is one of the engine's dense layers; return whether it is.

        Raises: ValueError if it does what sparse layers do not support.
        """
        if index in served.dense_layers:
            return False
        self.require(spec)
        served.require_room(spec)
        if self.paged is None:
            self.paged, self._words = served.layer(index, self), served.words
        return True

    def require(self, spec: Any) -> None:
        """Raise ValueError if the kernels do not support a cache spec."""

    def pages(self, cache: Tensor) -> Any:
        """View the cache as pages; the views are kept, because making them takes longer than a launch.

        In host memory it is moved to huge pages, because tokens are read far apart.
        """
        if self._known[0] is not cache:
            if cache.device.type == "cpu":
                in_huge_pages(torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()), written=True)
            self._known = cache, pages_of(cache, self._words)
        return self._known[1]
