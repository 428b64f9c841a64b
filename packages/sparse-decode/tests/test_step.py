"""One step on every backend, for every kind of call, equals the reference, which is a dozen equations in float64.

The backends: the CPU's kernels, and the operators of CUDA with their kernels under the host simulator.
"""

import functools
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch
from hashcore.cpu import team, threads
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import HashSelector, step
from sparse_decode.budget import LayerBudget
from sparse_decode.caches.cache import Uncached, retype
from sparse_decode.caches.growing import Owned
from sparse_decode.cpu.lanes import observe, publish
from sparse_decode.cuda import gather as cuda_gather
from sparse_decode.cuda import sums as cuda_sums
from sparse_decode.inputs import Inputs
from sparse_decode.intervals import causal
from sparse_decode.reference import step_reference
from sparse_decode.step import SparseLayer
from sparse_decode.sums import FOLD
from sparse_decode_doubles import PaperLikeHasher, SignHasher
from sparse_decode_simulated import device as simulated
from transformers.cache_utils import DynamicLayer, StaticLayer

HQ, HKV, DIM = 4, 2, 16
FITTED = torch.tensor([[-1.0, 0.4, 0.5, 0.1, -0.2, 0.6]]).repeat(HQ, 1) * torch.linspace(0.8, 1.2, HQ)[:, None]
# Relative to values of about 1. A weight is rounded to the type before it multiplies values on CUDA, and a step reads
# 8 bits of each number of the covariance.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ROUNDED = 5e-3
BUDGETS = {
    "tenth": LayerBudget(0.1, min_tokens=2, sink=1, recent=2),
    "no ends": LayerBudget(0.2, sink=0, recent=0),
    "by head": LayerBudget(0.2, sink=2, recent=1, by_head=(0.5, 1.5)),
    "all": LayerBudget(1.0),
    "few": LayerBudget(0.02, sink=3, recent=4),
    "short ones whole": LayerBudget(0.1, sink=1, recent=2, dense_below=60),
}
HASHERS = {
    "planes": lambda: HashSelector(_trained("planes")),
    "lsh": lambda: HashSelector(_trained("lsh")),
    "paper": lambda: HashSelector(PaperLikeHasher()),
    "signs": lambda: HashSelector(SignHasher()),
    "query heads": lambda: HashSelector(_trained("planes"), per_query_head=True),
}


def _trained(variant):
    return Hasher(HasherConfig(variant, ModelShape(1, HQ, HKV, DIM), bits=64), 0).eval().requires_grad_(False)


@pytest.fixture(params=["cpu", "cuda"])
def backend(request, monkeypatch):
    """On `cuda`, every step takes the operators of a device, whose kernels run under the simulator."""
    if request.param == "cuda":
        monkeypatch.setattr(step, "readable", lambda x: False)
        gather = functools.partial(cuda_gather.gather, run=simulated(5))
        add_token = functools.partial(cuda_sums.launch_sums, run=simulated(5))
        monkeypatch.setattr(step, "OPERATORS", SimpleNamespace(gather=gather))
        monkeypatch.setattr(cuda_sums, "OPERATORS", SimpleNamespace(add_token=add_token))
    return request.param


def drawn(batch, rows, n, dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = (batch, HQ, rows, DIM), (batch, HKV, n, DIM), (batch, HKV, n, DIM)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def layer_of(selector, budget, remainder=False):
    return SparseLayer(0, selector, budget, None, FITTED if remainder else None)


def check(layer, x, interval, out):
    seen = causal(*x.q.shape[::2][:1], x.q.shape[2], x.k.shape[2], x.q.device) if interval is None else interval
    expected = step_reference(layer, x, seen)
    close = max(TOLERANCES[x.q.dtype], ROUNDED if layer.remainder is not None else 0)
    torch.testing.assert_close(out.float(), expected.float(), rtol=close, atol=close)


def padding(batch, rows, n):
    """Intervals of left-padded sequences: the first has none."""
    starts = torch.tensor([0, 9, 40][:batch])[:, None].expand(batch, rows)
    ends = torch.arange(n - rows + 1, n + 1).expand(batch, rows)
    return torch.stack([starts.minimum(ends), ends], -1)


def kinds(backend):
    return (torch.bfloat16, torch.float16) if backend == "cuda" else (torch.float32, torch.bfloat16)


GROWN = [(hasher, "dynamic", padded) for hasher in HASHERS for padded in (False, True)] + [("planes", "static", True)]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("hasher", "cache", "padded"), GROWN)
@pytest.mark.parametrize("remainder", [False, True])
def test_steps_of_a_cache(backend, hasher, cache, padded, remainder):
    """A prompt, then one token at a time: hashed late, summed in place, counted.

    The room of a static cache is longer than what is seen; on a device the host does not know how many tokens there
    are.
    """
    for dtype in kinds(backend):
        layer = layer_of(HASHERS[hasher](), BUDGETS["few" if hasher == "lsh" else "tenth"], remainder)
        _, k, v = drawn(3, 1, 60 + FOLD + 4, dtype)
        held, read = retype(DynamicLayer() if cache == "dynamic" else StaticLayer(100), Owned(), layer.encoder), 0
        held.update(k[:, :, :60], v[:, :, :60])
        if cache == "static":
            held.sums.advance(k, v, padding(3, 1, 60)[:, 0, 0], 60, k.device)
        for n in range(61, k.shape[2] + 1):
            keys, values = held.update(k[:, :, n - 1 : n], v[:, :, n - 1 : n])
            if backend == "cpu":
                keys, values = keys[:, :, :n], values[:, :, :n]
            x, interval = Inputs(drawn(3, 1, 1, dtype, n)[0], keys, values, 0.25), padding(3, 1, n) if padded else None
            out = layer.step(x, interval, held)
            read += 3 * n - 49 * padded
            if n % 5 == 0 or n > k.shape[2] - 3:
                check(layer, x._replace(k=keys[:, :, :n], v=values[:, :, :n]), interval, out)
        assert layer.counts()[1] == HQ * read


@pytest.mark.sample(10)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "sinks": torch.linspace(-1, 2, HQ)}], ids=["", "capped"])
def test_every_budget(backend, budget, padded, options):
    for dtype in kinds(backend):
        layer = layer_of(HASHERS["planes"](), BUDGETS[budget])
        q, k, v = drawn(3, 1, 110, dtype)
        interval = padding(3, 1, 110) if padded else None
        x = Inputs(q, k, v, 0.25, **options)
        check(layer, x, interval, layer.step(x, interval, Uncached(layer.encoder(k))))


@pytest.mark.sample(4)
@pytest.mark.parametrize("remainder", [False, True])
@pytest.mark.parametrize("hasher", ["planes", "paper"])
def test_rows_of_a_chunk(backend, remainder, hasher, monkeypatch):
    """Several rows a sequence, in blocks."""
    monkeypatch.setattr(step, "ROWS_AT_ONCE", 7)
    for dtype in kinds(backend):
        for padded in (False, True):
            layer = layer_of(HASHERS[hasher](), BUDGETS["tenth"], remainder)
            q, k, v = drawn(2, 20, 70, dtype)
            interval, x = padding(2, 20, 70) if padded else None, Inputs(q, k, v, 0.25)
            check(layer, x, interval, layer.step(x, interval, Uncached(layer.encoder(k))))


def test_other_rows_of_a_batch_do_not_matter(backend):
    """A sequence with NaN everywhere leaves the others as they are, to the bit."""
    layer = layer_of(HASHERS["planes"](), BUDGETS["tenth"])
    q, k, v = drawn(3, 1, 90, torch.bfloat16)
    expected = layer.step(Inputs(q, k, v, 0.25), None, Uncached(layer.encoder(k)))
    k[1], v[1] = torch.nan, torch.inf
    out = layer.step(Inputs(q, k, v, 0.25), None, Uncached(layer.encoder(k)))
    assert torch.equal(out[::2], expected[::2])


def test_a_changed_padding_is_noticed(backend):
    """On the CPU the sums are made anew; on a device, where the host does not look, the result is no number."""
    layer = layer_of(HASHERS["planes"](), BUDGETS["tenth"], remainder=True)
    q, k, v = drawn(2, 1, 62, torch.bfloat16)
    held = retype(DynamicLayer(), Owned(), layer.encoder)
    for n in (60, 61, 62):
        keys, values = held.update(*(y[:, :, (n - 1) * (n > 60) : n] for y in (k, v)))
        interval = padding(2, 1, n)
        if n == 62:
            interval[1, 0, 0] = 5
        x = Inputs(q, keys, values, 0.25)
        out = layer.step(x, interval, held) if n > 60 else None
    if backend == "cpu":
        check(layer, x, interval, out)
    else:
        assert out[1].isnan().all()
        assert not out[0].isnan().any()


def follow(first, last, ready, told, seen):
    """Task 0 tells numbers one after the other; task 1 looks how far it got, and what it then finds."""
    for task in range(first, last):
        for i in range(1, len(told)):
            if task == 0:
                told[i] = 10 * i
                publish(ready, 0, i)
            else:
                at = observe(ready, 0)
                seen[i] = told[at] - 10 * at


@pytest.mark.usefixtures("real_threads")
def test_who_observes_a_number_sees_what_was_written_before_it():
    if team.runtime() is None:
        pytest.skip("torch uses no OpenMP here")
    kernel = numba.njit(nogil=True, no_cfunc_wrapper=True)(follow)
    for _ in range(20):
        ready, told, seen = np.zeros(1, np.int64), np.zeros(3000, np.int64), np.ones(3000, np.int64)
        team.run(kernel, 2, 2, (ready, told, seen))
        assert ready[0] == 2999
        assert not seen[1:].any()


def test_a_wide_search_is_divided_among_threads(monkeypatch):
    """With fewer sequences and heads than threads, the search runs by itself; the result is the same to the bit."""
    layer = layer_of(HASHERS["planes"](), BUDGETS["tenth"], remainder=True)
    q, k, v = drawn(1, 1, 3000, torch.float32)
    expected = layer.step(Inputs(q, k, v, 0.25), None, Uncached(layer.encoder(k)))
    few = SimpleNamespace(GRAIN=1 << 10, TEAM_GRAIN=1 << 10, most=lambda: 4, count=lambda *_: 1, run=threads.run)
    monkeypatch.setattr("sparse_decode.cpu.step.threads", few)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    selected = []
    select = HashSelector.select
    monkeypatch.setattr(HashSelector, "select", lambda own, rows: (selected.append(rows), select(own, rows))[1])
    assert torch.equal(layer.step(Inputs(q, k, v, 0.25), None, Uncached(layer.encoder(k))), expected)
    assert selected
