"""Attention over a selection on a GPU, against the same on the CPU. Skipped without one."""

import pytest
import torch
from sparse_decode.attend import attend

pytest.importorskip("cuda.core", reason="cuda-core comes with the extra hashcore[cuda]")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; test_gather.py runs on the CPU"),
]
KINDS = [(128, 128, torch.bfloat16), (64, 64, torch.float16), (80, 48, torch.bfloat16), (256, 256, torch.float16)]
# Weights are rounded to the type before they multiply values of a few units; stats are float32 throughout.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
FACTS = 1e-4


def make(kind, group, sets, tokens, width, batch=1, queries=1, seed=0):
    dim, value_dim, dtype = kind
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, sets * group, queries, dim), (batch, sets, tokens, dim), (batch, sets, tokens, value_dim)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    indices = torch.randint(-1, tokens, (batch, sets, queries, width), generator=generator)
    return q, k, v, indices


def assert_close(ours, expected):
    torch.testing.assert_close(ours[0].cpu(), expected[0], rtol=1e-2, atol=TOLERANCES[expected[0].dtype])
    torch.testing.assert_close(ours[1].cpu(), expected[1], rtol=FACTS, atol=FACTS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [1, 4, 7, 8, 16])
@pytest.mark.parametrize("width", [1, 17, 600, 5000])
def test_equals_the_cpu(kind, group, width):
    inputs = make(kind, group, 2, 3000, width, batch=2, queries=2, seed=width)
    on_device = [x.cuda() for x in inputs]
    scaling, sinks = kind[0] ** -0.5, torch.linspace(-3, 3, 2 * group)
    for softcap, sink in ((None, None), (5.0, sinks)):
        expected = attend(*inputs, scaling, softcap=softcap, sinks=sink, lse=True)
        there = None if sink is None else sink.cuda()
        assert_close(attend(*on_device, scaling, softcap=softcap, sinks=there, lse=True), expected)


def test_what_is_not_selected_is_not_read():
    q, k, v, indices = make(KINDS[0], 7, 2, 3000, 500)
    expected = attend(q, k, v, indices, 0.1, lse=True)
    chosen = torch.zeros(k.shape[:3], dtype=torch.bool)
    for s in range(2):
        chosen[0, s, indices[0, s, 0][indices[0, s, 0] >= 0]] = True
    k[~chosen], v[~chosen] = torch.nan, torch.nan
    assert_close(attend(q.cuda(), k.cuda(), v.cuda(), indices.cuda(), 0.1, lse=True), expected)


def test_the_answer_is_the_same_every_time():
    inputs = [x.cuda() for x in make(KINDS[0], 7, 4, 100_000, 2000)]
    first = attend(*inputs, 0.1, lse=True)
    for _ in range(50):
        for ours, theirs in zip(attend(*inputs, 0.1, lse=True), first, strict=True):
            assert torch.equal(ours, theirs)


def test_a_graph_replays_on_new_values():
    inputs = [x.cuda() for x in make(KINDS[0], 7, 4, 5000, 300)]
    attend(*inputs, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(*inputs, 0.1, lse=True)
    for seed in (1, 2):
        fresh = make(KINDS[0], 7, 4, 5000, 300, seed=seed)
        for x, value in zip(inputs, fresh, strict=True):
            x.copy_(value)
        graph.replay()
        assert_close(found, attend(*fresh, 0.1, lse=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_waits_for_no_result():
    inputs = [x.cuda() for x in make(KINDS[0], 7, 4, 5000, 300)]
    for mode in ("default", "error"):  # the first round loads the kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            attend(*inputs, 0.1, lse=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
