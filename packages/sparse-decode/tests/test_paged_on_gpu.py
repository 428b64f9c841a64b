"""Decoding over pages on a GPU, against the same on the CPU; in a graph, too. Skipped without one."""

import pytest
import torch
from sparse_decode.budget import LayerBudget
from sparse_decode.cuda.pages import DeviceStep
from sparse_decode.pages import PagedLayer, Pages, paged_cuda
from test_paged import DIM, Batch, selector

pytest.importorskip("cuda.core", reason="cuda-core comes with the extra hashcore[cuda]")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; test_paged_cuda.py runs on the CPU"),
]
CLOSE = {"rtol": 1e-2, "atol": 2e-2}  # bfloat16: weights are rounded before they multiply values
BUDGETS = [
    LayerBudget(0.02, min_tokens=8),
    LayerBudget(0.25, sink=2, recent=3),
    LayerBudget(1.0),
    LayerBudget(0.1, dense_below=200),
]


def on_device(batch: Batch) -> Pages:
    """Copy a pool with its strides."""
    memory = batch.memory.cuda()
    words = memory.view(torch.int32)

    def view(x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return of.flatten().as_strided(x.shape, x.stride(), x.storage_offset())

    return Pages(view(batch.pages.k, memory), view(batch.pages.v, memory), view(batch.pages.codes, words))


@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_a_step_is_that_of_the_cpu(budget, size):
    layer, batch = PagedLayer(1, selector(), DIM**-0.5), Batch([5, 199, 200, 700, 1500], size, torch.bfloat16, shared=2)
    batch.fill(layer)
    expected = layer.decode(batch.q, batch.pages, batch.step(budget))
    lengths = torch.tensor(batch.lengths, dtype=torch.int32)
    step = DeviceStep.of(batch.blocks.cuda(), lengths.cuda(), budget, size, 1500)
    out = paged_cuda.decode(layer, batch.q.cuda(), on_device(batch), step)
    torch.testing.assert_close(out.cpu(), expected, **CLOSE)


def test_codes_go_to_their_slots():
    layer, batch = PagedLayer(1, selector(), DIM**-0.5), Batch([100, 40], 16, torch.bfloat16)
    batch.fill(layer)
    pages = on_device(batch)
    slots, codes = torch.tensor([17, -1, 40]), torch.randint(-(2**31), 2**31, (3, 2, 4)).int()
    paged_cuda.write_codes(pages, slots.cuda(), codes.cuda())
    batch.pages.codes[1, :, 1], batch.pages.codes[2, :, 8] = codes[0], codes[2]
    assert torch.equal(pages.codes.cpu(), batch.pages.codes)


def test_a_graph_replays_at_other_lengths():
    """Captured for the longest context, the step included; replayed as requests grow."""
    layer, batch = PagedLayer(1, selector(), DIM**-0.5), Batch([700, 400], 16, torch.bfloat16)
    batch.fill(layer)
    budget, pages, q = LayerBudget(0.1, sink=2, recent=3), on_device(batch), batch.q.cuda()
    blocks, lengths = batch.blocks.cuda(), torch.tensor([700, 400], dtype=torch.int32, device="cuda")

    def step() -> torch.Tensor:
        return paged_cuda.decode(layer, q, pages, DeviceStep.of(blocks, lengths, budget, 16, 700))

    step()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for ends in ([700, 400], [33, 399], [600, 1]):
        lengths.copy_(torch.tensor(ends))
        graph.replay()
        batch.lengths = ends
        torch.testing.assert_close(out.cpu(), layer.decode(batch.q, batch.pages, batch.step(budget)), **CLOSE)
