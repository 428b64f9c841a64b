"""Decoding over pages: each row reads what the reference reads in one contiguous cache, whatever lies elsewhere.

On the CPU with its kernels, where a row is also to the bit what `attach` gives, and on CUDA under the host simulator,
between guard pages.
"""

import types

import pytest
import torch
from hashtrain import Hasher, HasherConfig
from paged_cases import BITS, BUDGETS, DIM, HKV, HQ, LENGTHS, SHAPE, SIZES, Batch, layer_of, pool, selector
from sparse_decode.budget import LayerBudget
from sparse_decode.caches.cache import Uncached
from sparse_decode.cuda import pages as cuda_pages
from sparse_decode.cuda.pages import DeviceStep
from sparse_decode.intervals import causal
from sparse_decode.pages import PagedLayer, Step
from sparse_decode.reference import step_reference, tokens_read
from sparse_decode.select import HashSelector
from sparse_decode.step import SparseLayer
from sparse_decode_simulated import inside, send_steps

CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=["cpu", "cuda"])
def backend(request, monkeypatch):
    """What decodes; on `cuda` it is sent to the simulator, and `kernels` are listed."""
    if request.param == "cpu":
        decode = lambda layer, batch, budget: layer.decode(batch.q, batch.pages, batch.step(budget))  # noqa: E731
        return types.SimpleNamespace(name="cpu", decode=decode)
    return simulated(monkeypatch)


def simulated(monkeypatch, order=0):
    kernels = send_steps(monkeypatch, order)

    def decode(layer, batch, budget, longest=None):
        return cuda_pages.decode(layer, batch.q, batch.pages, on_device(batch, budget, longest))

    return types.SimpleNamespace(name="cuda", decode=decode, kernels=kernels)


def on_device(batch, budget, longest=None):
    lengths = inside(torch.tensor(batch.lengths, dtype=torch.int32))
    return DeviceStep.of(inside(batch.blocks), lengths, budget, batch.size, longest or max(batch.lengths))


def guarded(lengths, size, dtype, layer):
    batch = Batch(lengths, size, dtype, layer)
    batch.moved(inside)
    return batch


def of_row(layer, budget):
    """What attends in a row alone."""
    return SparseLayer(1, layer.selector, budget)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("size", SIZES)
def test_a_row_in_pages_is_the_row_alone(backend, name, size):
    budget, cpu, whole = BUDGETS[name], backend.name == "cpu", name == "25 %"
    for dtype in (torch.float32, torch.bfloat16) if cpu else (torch.bfloat16, torch.float16)[size % 3 :][:1]:
        layer = layer_of(softcap=5.0 if whole else None, sinks=torch.linspace(-2, 2, HQ) if whole else None)
        batch = guarded(LENGTHS, size, dtype, layer)
        out, own = backend.decode(layer, batch, budget), of_row(layer, budget)
        assert out.dtype == dtype
        for row, n in enumerate(LENGTHS):
            x = batch.alone(row, layer)
            expected = step_reference(own, x, causal(1, 1, n, x.q.device))[0, 0]
            torch.testing.assert_close(out[row], expected, rtol=1e-2, atol=CLOSE[dtype])
            alone = own.step(x, None, Uncached(own.encoder(x.k)))[0, 0]
            assert not cpu or torch.equal(out[row], alone)
        assert not cpu or (layer.selected, layer.visible) == own.counts()


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_not_selected_or_owned_is_not_read(backend, size):
    """NaN in unselected keys and values, the best of codes in freed pages and behind the last token: all the same."""
    budget, layer = BUDGETS["2 %"], layer_of()
    batch = guarded([1500, 700], size, torch.bfloat16, layer)
    clean, own = backend.decode(layer, batch, budget), of_row(layer, budget)
    best = batch.pages.codes[batch.blocks[0, 0], 0, 0].clone()
    for page in batch.free:
        batch.pages.codes[page] = best
    kept = torch.zeros(*batch.pages.k.shape[:3], dtype=torch.bool)
    for row, n in enumerate(batch.lengths):
        by_head = tokens_read(own, batch.alone(row, layer), 0, 0, (0, n))[:: HQ // HKV]
        for head, tokens in enumerate(by_head):
            at = batch.slots(row)[tokens]
            kept[at // size, head, at % size] = True
        for token in range(n, size * -(-n // size)):
            batch.pages.codes[batch.blocks[row, token // size], :, token % size] = best
    batch.pages.k[~kept], batch.pages.v[~kept] = torch.nan, torch.nan
    assert torch.equal(backend.decode(layer, batch, budget), clean)
    batch.pages.v[batch.blocks[0, 0], 0, 0] = torch.nan  # the sink: the poison would show
    assert backend.decode(layer, batch, budget).isnan().any()


@pytest.mark.sample(2)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_leaves_the_others_alone(backend, bad):
    budget, layer = BUDGETS["2 %"], layer_of()
    batch = guarded(LENGTHS, 16, torch.bfloat16, layer)
    clean, row = backend.decode(layer, batch, budget), LENGTHS.index(700)
    last = int(batch.slots(row)[-1])
    for x in (batch.pages.k, batch.pages.v):
        x[last // 16, :, last % 16, 3] = bad
    batch.q[row, :, 5] = bad
    out = backend.decode(layer, batch, budget)
    assert out[row].isnan().any()
    assert torch.equal(out[[n for n in range(len(LENGTHS)) if n != row]], clean[[*range(row), *range(row + 1, 6)]])


def test_a_bound_of_the_lengths_changes_nothing_but_room(monkeypatch):
    """A graph is captured for the longest context that an engine allows, and with rows that are not there."""
    layer, budget = layer_of(), LayerBudget(0.2, sink=2, recent=3)
    batch, device = guarded([700, 33], 16, torch.bfloat16, layer), simulated(monkeypatch)
    exact, longest = device.decode(layer, batch, budget), batch.blocks.shape[1] * batch.size
    assert on_device(batch, budget, longest).width > on_device(batch, budget).width
    assert device.kernels == ["list_candidates", "select_64", "gather", "combine"]
    torch.testing.assert_close(device.decode(layer, batch, budget, longest), exact, rtol=1e-2, atol=2e-2)
    batch.lengths[1] = 0
    batch.blocks[1] = -7
    out = device.decode(layer, batch, budget)
    assert torch.equal(out[0], exact[0])
    assert not out[1].any()


@pytest.mark.parametrize("order", [0, 7])
def test_codes_go_to_their_slots_and_nowhere_else(order, monkeypatch):
    batch, device = guarded([100, 40], 16, torch.bfloat16, layer_of()), simulated(monkeypatch, order)
    before, pages = batch.memory.clone(), batch.pages
    tokens = torch.randint(-(2**31), 2**31, (6, HKV, 4)).int()
    slots = torch.tensor([17, -1, 40, len(pages.k) * 16 - 1, len(pages.k) * 16, -(2**40)])
    cuda_pages.OPERATORS.place_codes(inside(tokens), inside(slots), pages.codes)
    view = pages.codes.shape, pages.codes.stride(), pages.codes.storage_offset()
    codes = before.view(torch.int32).flatten().as_strided(*view)
    for token in (0, 2, 3):
        page, place = divmod(int(slots[token]), 16)
        codes[page, :, place] = tokens[token]
    assert torch.equal(batch.memory.view(torch.int16), before.view(torch.int16))
    assert device.kernels == ["place_codes"]


def test_writing_leaves_other_slots_alone():
    memory, pages = pool(3, 16, torch.bfloat16)
    memory.zero_()
    k, v = torch.ones(2, 3, HKV, DIM).to(torch.bfloat16)
    pages.write(torch.tensor([17, -1, 40]), k, 2 * v, torch.full((3, HKV, 4), 7, dtype=torch.int32))
    touched = torch.zeros(3, 16, dtype=torch.bool)
    touched[1, 1] = touched[2, 8] = True
    for x, value in ((pages.k, 1), (pages.v, 2), (pages.codes, 7)):
        assert torch.equal((x == value).all(3).all(1), touched)
        assert torch.equal((x != 0).any(3).any(1), touched)


def test_what_does_not_fit_is_refused():
    batch, hasher = Batch([40, 20], 16, torch.float32), Hasher(HasherConfig("lsh", SHAPE, bits=BITS), 0)
    for shift, lengths, words in (
        (99, [40, 20], "pages in 0..9"),
        (0, [40, 99], "lengths must be in 1..80"),
        (0, [40, 0], "got 0..40"),
        (0, [40], r"got \(2, 5\) and \(1,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            Step.of(batch.blocks + shift, torch.tensor(lengths), LayerBudget(), 10, 16)
    with pytest.raises(ValueError, match="need codes per KV head"):
        PagedLayer(0, HashSelector(hasher, per_query_head=True), 1.0)
    with pytest.raises(ValueError, match=r"q must be torch\.float32"):
        PagedLayer(0, selector(), 1.0).decode(batch.q.half(), batch.pages, batch.step(LayerBudget()))
