"""State shared by the sparse layers of an engine: hasher, budget, and the page layout of vLLM's CPU cache."""

# vLLM is no dependency of this package.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from hashtrain import Hasher
from sparse_decode.budget import Budget
from torch import Tensor

from sparse_serve.settings import Settings


@contextmanager
def _float32() -> Generator[None]:
    """Set the default dtype to float32; vLLM sets it to the model's dtype while it creates layers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _place(size: int) -> tuple[int, int]:
    """Return this process's tensor-parallel rank and the number of ranks."""
    if size == 1:
        return 0, 1
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank(), size


class Served:
    """The sparse attention of one engine, for the heads of tensor-parallel rank `rank` of `size`.

    Attributes:
        latest: the instance of the engine whose layers were created last, for hooks of vLLM without an engine argument.
    """

    latest: ClassVar[Served | None] = None
    _known: ClassVar[dict[tuple[Settings, int, int], Served]] = {}

    def __init__(self, settings: Settings, rank: int = 0, size: int = 1) -> None:
        from sparse_decode.select import HashSelector  # imports numba, after vLLM has detected its compilers

        with _float32():
            self.hasher: Hasher = Hasher.from_pretrained(settings.hasher)
            whole = HashSelector(self.hasher)
            self.selector: HashSelector = whole if size == 1 else whole.shard(rank, size)
        self.budget: Budget = settings.budget()
        given = settings.dense_layers
        self.dense_layers: tuple[int, ...] = self.hasher.dense_layers if given is None else given
        self._words = self.hasher.config.bits // 32
        self._layers: list[Any] = []

    @classmethod
    def of(cls, vllm_config: Any) -> Served | None:
        """Return the instance for an engine's configuration, cached by settings; None if it is not configured."""
        settings = Settings.of(vllm_config.additional_config)
        if settings is None:
            return None
        key = settings, *_place(vllm_config.parallel_config.tensor_parallel_size)
        if key not in cls._known:
            cls._known[key] = cls(*key)
        return cls._known[key]

    def layer(self, index: int, scaling: float, softcap: float | None, sinks: Tensor | None) -> Any:
        """Create the `sparse_decode.paged.PagedLayer` of a layer; None if the layer stays dense."""
        from sparse_decode.paged import PagedLayer

        if index in self.dense_layers:
            return None
        made = PagedLayer(index, self.selector, scaling, softcap, sinks)
        self._layers.append(made)
        return made

    def counts(self) -> tuple[int, int]:
        """Return the numbers of selected and visible tokens so far, over layers, decode rows and query heads."""
        return sum(layer.selected for layer in self._layers), sum(layer.visible for layer in self._layers)

    def tail_bytes(self, block_size: int, heads: int, others: int) -> int:
        """Return the bytes that codes add to a page."""
        from sparse_decode.paged import tail_bytes

        return tail_bytes(block_size, heads, self._words, others)

    def pages(self, cache: Tensor) -> Any:
        """View a layer's cache [M, Hkv, S, 2 D] as `sparse_decode.paged.Pages`: keys, values, and codes after them."""
        from sparse_decode.paged import Pages

        pages, heads, size, width = cache.shape
        both = cache.view(pages, heads, 2 * size, width // 2)
        item, row = cache.element_size(), size * self._words
        at, page = (cache.storage_offset() + heads * size * width) * item, cache.stride(0) * item
        if page < (heads * size * width) * item + 4 * heads * row or at % 4 or page % 4:
            raise ValueError(f"a page must have room for codes after its keys and values, got {page} bytes")
        codes = torch.empty(0, dtype=torch.int32).set_(
            cache.untyped_storage(), at // 4, (pages, heads, size, self._words), (page // 4, row, self._words, 1)
        )
        return Pages(both[:, :, :size], both[:, :, size:], codes)
