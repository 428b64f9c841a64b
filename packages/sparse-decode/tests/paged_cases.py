"""Rows of given lengths in pages, each also alone in one contiguous cache."""

import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode.budget import LayerBudget
from sparse_decode.inputs import Inputs
from sparse_decode.pages import PagedLayer, Pages, Step, tail_bytes
from sparse_decode.select import HashSelector

HQ, HKV, DIM, BITS = 4, 2, 64, 128
SHAPE = ModelShape(2, HQ, HKV, DIM)
SIZES = [16, 32, 128]
LENGTHS = [1, 5, 199, 200, 700, 1500]
BUDGETS = {
    "2 %": LayerBudget(0.02, min_tokens=8, sink=4, recent=1),
    "25 %": LayerBudget(0.25, sink=2, recent=3),
    "100 %": LayerBudget(1.0),
    "dense below": LayerBudget(0.1, dense_below=200),
    "no ends": LayerBudget(0.1, sink=0, recent=0),
    "the ends alone": LayerBudget(0.001, sink=3, recent=2),
}


def selector(variant="planes") -> HashSelector:
    return HashSelector(Hasher(HasherConfig(variant, SHAPE, bits=BITS), 0))


def layer_of(**how) -> PagedLayer:
    return PagedLayer(1, selector(), DIM**-0.5, **how)


def pool(pages: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, Pages]:
    """Pages as an engine lays them: keys, values, then codes in the tail; NaN, and words of any kind, everywhere."""
    numbers = 2 * HKV * size * DIM
    others = numbers * dtype.itemsize
    page = others + tail_bytes(size, HKV, BITS // 32, others)
    memory = torch.full((pages, page // dtype.itemsize), torch.nan, dtype=dtype)
    both = memory[:, :numbers].view(pages, HKV, 2 * size, DIM)
    words = memory.view(torch.int32)[:, others // 4 : others // 4 + size * HKV * BITS // 32]
    return memory, Pages(both[:, :, :size], both[:, :, size:], words.view(pages, HKV, size, BITS // 32))


class Batch:
    """The first two pages of all rows long enough are the same.

    Attributes: k, v: of each row, [n, Hkv, D]; blocks: page tables, -7 after a row's last page; free: pages of no row.
    """

    def __init__(self, lengths: list[int], size: int, dtype: torch.dtype, layer: PagedLayer | None = None):
        draw = torch.Generator().manual_seed(0)
        needed = [-(-n // size) for n in lengths]
        self.size, self.lengths = size, lengths
        order = torch.randperm(sum(needed) + 5, generator=draw).tolist()
        self.memory, self.pages = pool(len(order), size, dtype)
        self.blocks = torch.full((len(lengths), max(needed) + 2), -7, dtype=torch.int32)
        self.q = torch.randn(len(lengths), HQ, DIM, generator=draw).to(dtype)
        prefix, shared = torch.randn(2, 2 * size, HKV, DIM, generator=draw).to(dtype), None
        self.k, self.v = [], []
        for row, (n, count) in enumerate(zip(lengths, needed, strict=True)):
            mine = [order.pop() for _ in range(count)]
            both = torch.randn(2, n, HKV, DIM, generator=draw).to(dtype)
            if count > 2:
                both[:, : 2 * size] = prefix
                shared = mine[:2] if shared is None else shared
                mine[:2] = shared
            self.blocks[row, :count] = torch.tensor(mine)
            self.k.append(both[0])
            self.v.append(both[1])
            if layer is not None:
                self.pages.write(self.slots(row), *both, layer.encode(both[0]))
        self.free = order

    def slots(self, row: int) -> torch.Tensor:
        at = torch.arange(self.lengths[row])
        return self.blocks[row].long()[at // self.size] * self.size + at % self.size

    def step(self, budget: LayerBudget) -> Step:
        return Step.of(self.blocks, torch.tensor(self.lengths), budget, len(self.pages.k), self.size)

    def alone(self, row: int, layer: PagedLayer) -> Inputs:
        """A row as one sequence in one contiguous cache."""
        q, k, v = (x.transpose(0, 1)[None] for x in (self.q[row][None], self.k[row], self.v[row]))
        return Inputs(q, k, v, layer.scaling, layer.softcap, layer.sinks)

    def moved(self, change) -> None:
        """Replace the pool by `change` of it, with the same strides."""
        self.memory = change(self.memory)
        flat = {x.dtype: x.flatten() for x in (self.memory, self.memory.view(torch.int32))}
        self.pages = Pages(*(flat[x.dtype].as_strided(x.shape, x.stride(), x.storage_offset()) for x in self.pages))
