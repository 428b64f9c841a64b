"""Decoding over pages on CUDA: results under the host simulator, launches and waits by a device that is not there.

Between guard pages; NaN in what no row owns or selects. The selection is that of the CPU, tolerance 0; so is the output
beside that of the same kernels over contiguous keys and values.
"""

import types

import pytest
import torch
from fake_gpu import Operators, fake_gpu, launches_of
from hashcore import torch_ops
from hashcore.cuda.source import read_source
from hashtrain import Hasher, HasherConfig
from hostsim import SimulationError, Simulator
from sparse_decode.budget import LayerBudget
from sparse_decode.cuda import gather
from sparse_decode.cuda.pages import DeviceStep
from sparse_decode.pages import PagedLayer, Pages, paged_cuda
from sparse_decode.select import HashSelector
from sparse_decode_simulated import device, inside, steps
from test_paged import DIM, HKV, HQ, SHAPE, Batch, selector

ORDERS = [0, 1, 7]
LENGTHS = [5, 199, 200, 700, 1500]
BUDGETS = {
    "2 %": LayerBudget(0.02, min_tokens=8, sink=4, recent=1),
    "25 %": LayerBudget(0.25, sink=2, recent=3),
    "100 %": LayerBudget(1.0),
    "dense below": LayerBudget(0.1, dense_below=200),
    "no ends": LayerBudget(0.1, sink=0, recent=0),
    "the ends alone": LayerBudget(0.001, sink=3, recent=2),
}
CLOSE = 2e-2  # bfloat16: weights are rounded before they multiply values


class Guarded(Batch):
    """A batch whose pool and tables lie between guard pages."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.blocks = inside(self.blocks)

    def fill(self, layer):
        super().fill(layer)
        memory = inside(self.memory)
        words = memory.view(torch.int32)
        self.memory, self.pages = (
            memory,
            Pages(*(self._of(x, words if x.dtype == torch.int32 else memory) for x in self.pages)),
        )

    def _of(self, x, memory):
        return memory.flatten().as_strided(x.shape, x.stride(), x.storage_offset())

    def on_device(self, budget, longest=None):
        lengths = inside(torch.tensor(self.lengths, dtype=torch.int32))
        return DeviceStep.of(self.blocks, lengths, budget, self.size, longest or max(self.lengths))


@pytest.fixture
def simulated(monkeypatch):
    """Send what decodes over pages to the simulator, in one thread order."""

    def use(order=0):
        run = steps(order)
        monkeypatch.setattr("hashcore.cuda.launch.run", run)
        search = torch_ops.on_cuda("search")
        monkeypatch.setattr(paged_cuda, "SEARCH", types.SimpleNamespace(search=search))
        ours = types.SimpleNamespace(gather_paged=gather._paged, place_codes=paged_cuda.place_codes)
        monkeypatch.setattr(paged_cuda, "OPERATORS", ours)
        return run

    return use


def filled(lengths, size, dtype=torch.bfloat16, **how):
    layer, batch = PagedLayer(1, selector(), DIM**-0.5), Guarded(lengths, size, dtype, shared=2)
    layer.softcap, layer.sinks = how.get("softcap"), how.get("sinks")
    batch.fill(layer)
    return layer, batch


def between_ends(n, budget):
    return [*range(min(budget.sink, n), max(n - budget.recent, min(budget.sink, n)))]


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("name", BUDGETS)
def test_the_selection_is_that_of_the_cpu(name, size, simulated):
    budget, (layer, batch) = BUDGETS[name], filled(LENGTHS, size)
    simulated(ORDERS[size % 3])
    rows, step = batch.q[:, :, None], batch.step(budget)
    found = paged_cuda.choose(layer, rows, batch.pages.codes, batch.on_device(budget))
    expected = layer._choose(rows, batch.pages.codes, step)
    for row, n in enumerate(batch.lengths):
        for head in range(HKV):
            ours = [i for i in found[row, head, 0].tolist() if i >= 0]
            if step.dense[row]:
                assert ours == between_ends(n, budget)
            else:
                assert ours == [i for i in expected[row, head, 0].tolist() if i >= 0]


@pytest.mark.parametrize("name", BUDGETS)
def test_a_step_is_that_of_the_cpu(name, simulated):
    sinks = torch.linspace(-2, 2, HQ) if name == "25 %" else None
    layer, batch = filled(LENGTHS, 32, sinks=sinks, softcap=5.0 if name == "2 %" else None)
    expected = layer.decode(batch.q, batch.pages, batch.step(BUDGETS[name]))
    run, step = simulated(), batch.on_device(BUDGETS[name])
    out = paged_cuda.decode(layer, batch.q, batch.pages, step)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=CLOSE)
    assert step.counts.tolist() == [layer.selected // HQ, layer.visible // HQ]
    search = ["list_candidates", "select_64"] if step.width else []
    assert run.kernels == [*search, "gather", "combine"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_pages_change_no_bit_of_attention(order, dtype, simulated):
    """The same tokens, gathered into contiguous keys and values, through the kernels without pages."""
    layer, batch = filled([700, 33, 400], 16, dtype)
    simulated(order)
    step = batch.on_device(LayerBudget(0.2, sink=2, recent=3))
    rows = batch.q[:, :, None]
    out = paged_cuda.decode(layer, batch.q, batch.pages, step)
    chosen = paged_cuda.choose(layer, rows, batch.pages.codes, step)
    owned = torch.arange(batch.blocks.shape[1]) * batch.size < step.lengths[:, 0]
    table = torch.where(owned, batch.blocks, 0).long()
    k, v = (x[table].transpose(1, 2).flatten(2, 3) for x in batch.pages[:2])
    alone = gather.attend(rows, inside(k), inside(v), chosen, layer.scaling, None, None, always=step.always)[0]
    assert torch.equal(out, alone[:, 0])
    assert out.isfinite().all()


def test_what_is_not_selected_is_not_read(simulated):
    budget, (layer, batch) = BUDGETS["2 %"], filled([1500, 700], 32)
    simulated()
    step = batch.on_device(budget)
    clean = paged_cuda.decode(layer, batch.q, batch.pages, step)
    picked = paged_cuda.choose(layer, batch.q[:, :, None], batch.pages.codes, step)
    for row, n in enumerate(batch.lengths):
        for head in range(HKV):
            read = {*step.always[row].tolist(), *picked[row, head, 0].tolist()}
            for token in range(2 * batch.size, n):  # behind the shared pages
                if token not in read:
                    page, place = batch.blocks[row, token // batch.size], token % batch.size
                    batch.pages.k[page, head, place] = torch.nan
                    batch.pages.v[page, head, place] = torch.nan
    assert torch.equal(paged_cuda.decode(layer, batch.q, batch.pages, step), clean)
    batch.pages.v[batch.blocks[0, 0], 0, 0] = torch.nan  # the sink: the poison would show
    assert paged_cuda.decode(layer, batch.q, batch.pages, step).isnan().any()


def test_a_bound_of_the_lengths_changes_nothing_but_room(simulated):
    """A graph is captured for the longest context that an engine allows, and with rows that are not there."""
    layer, batch = filled([700, 33], 16)
    simulated()
    budget = LayerBudget(0.2, sink=2, recent=3)
    exact = paged_cuda.decode(layer, batch.q, batch.pages, batch.on_device(budget))
    wide = batch.on_device(budget, longest=batch.blocks.shape[1] * batch.size)
    assert wide.width > batch.on_device(budget).width
    torch.testing.assert_close(paged_cuda.decode(layer, batch.q, batch.pages, wide), exact, rtol=1e-2, atol=CLOSE)
    batch.lengths[1] = 0
    batch.blocks[1] = -7
    out = paged_cuda.decode(layer, batch.q, batch.pages, batch.on_device(budget))
    torch.testing.assert_close(out[0], exact[0], rtol=0, atol=0)
    assert not out[1].any()


@pytest.mark.parametrize("order", ORDERS)
def test_codes_go_to_their_slots_and_nowhere_else(order, simulated):
    _, batch = filled([100, 40], 16)
    run = simulated(order)
    before, pages = batch.memory.clone(), batch.pages
    tokens = torch.randint(-(2**31), 2**31, (6, HKV, 4)).int()
    slots = torch.tensor([17, -1, 40, len(pages.k) * 16 - 1, len(pages.k) * 16, -(2**40)])
    paged_cuda.write_codes(pages, inside(slots), inside(tokens))
    codes = batch._of(pages.codes, before.view(torch.int32))
    for token in (0, 2, 3):
        page, place = divmod(int(slots[token]), 16)
        codes[page, :, place] = tokens[token]
    assert torch.equal(batch.memory.view(torch.int16), before.view(torch.int16))
    assert run.kernels == ["place_codes"]


def test_the_guard_pages_catch_a_place_that_is_wrong():
    """These tests can fail: a kernel that looks up the wrong page is stopped or seen."""
    _, batch = filled([700, 33], 16)
    step = batch.on_device(LayerBudget(0.2))
    indices = torch.full((2, HKV, 1, 4), -1)
    text = read_source(gather.KERNELS, "gather.cu")
    assert text.count("pages.table + (token >> pages.shift)") == 1
    text = text.replace("pages.table + (token >> pages.shift)", "pages.table + (token >> pages.shift) + 300")
    macros = gather.macros(DIM, DIM, torch.bfloat16, paged=True)
    broken = Simulator(text, ["gather", "combine"], dict(macros))
    how = {"always": step.always, "blocks": batch.blocks, "run": device(broken=broken)}
    with pytest.raises(SimulationError):
        gather.attend(batch.q[:, :, None], *batch.pages[:2], indices, 0.1, None, None, **how)


def decoded(rows: int, variant: str, pages: int = 50, size: int = 16, longest: int = 800):
    """Decode fake rows on a device that is not there; list the operators that launch something, and the copies."""
    hasher = Hasher(HasherConfig(variant, SHAPE, bits=128), 0)
    with fake_gpu(), torch.device("cuda"), torch.inference_mode():
        layer = PagedLayer(1, HashSelector(hasher), 0.1)
        shape, kind = (pages, HKV, size), torch.bfloat16
        pool = Pages(*(torch.empty(*shape, DIM, dtype=kind) for _ in range(2)), torch.empty(*shape, 4).int())
        blocks, lengths = torch.zeros(rows, longest // size).int(), torch.zeros(rows).int()
        q, k, slots = (
            torch.zeros(rows, HQ, DIM, dtype=kind),
            torch.zeros(rows, HKV, DIM, dtype=kind),
            torch.zeros(rows).long(),
        )
        layer.encode(k)  # moves the hasher's weights
        with Operators() as making:
            step = DeviceStep.of(blocks, lengths, LayerBudget(0.02), size, longest)
        with Operators() as seen:
            paged_cuda.write_codes(pool, slots, layer.encode(k))
            out = paged_cuda.decode(layer, q, pool, step)
        assert (out.shape, out.device.type) == ((rows, HQ, DIM), "cuda")
    return making, seen


@pytest.mark.parametrize("variant", ["planes", "transform"])
def test_a_step_waits_for_nothing_and_its_launches_are_counted(variant):
    making, seen = decoded(4, variant)
    launching = [name for name in seen.launching if name not in ("clone", "contiguous")]
    assert launching == ["hash_keys", "place_codes", "hash_queries", "search", "gather_paged"]
    assert sum(launches_of(name) for name in launching) == 7
    assert len(seen.launching) - len(launching) <= 2  # keys and queries in the order that the hash functions read
    assert not seen.copies + seen.on_host + making.copies + making.on_host
    assert len(making.launching) <= 30  # once a step, for all layers


def test_many_rows_are_hashed_by_torch_and_wait_for_nothing():
    _, seen = decoded(64, "transform")
    assert {"place_codes", "search", "gather_paged"} <= set(seen.launching)
    assert not seen.copies + seen.on_host


REFUSED = {
    "int64 tables": (lambda t, n: DeviceStep.of(t.long(), n, LayerBudget(), 16, 64), "blocks must be int32"),
    "one length": (lambda t, n: DeviceStep.of(t, n[:1], LayerBudget(), 16, 64), r"got torch.int32 \(2, 4\) and \(1,\)"),
    "too long": (lambda t, n: DeviceStep.of(t, n, LayerBudget(), 16, 65), "longest must be in 1..64"),
    "pages of 24": (
        lambda t, n: gather.attend(
            torch.zeros(2, HQ, 1, DIM).half(), *torch.zeros(2, 3, HKV, 24, DIM).half(),
            torch.zeros(2, HKV, 1, 4).long(), 0.1, None, None, blocks=t,
        ),
        "power of two of tokens, below 2.31 in all, got 3 pages of 24",
    ),
    "slots of 32 bits": (
        lambda t, n: paged_cuda.place_codes(torch.zeros(2, 2, 4).int(), n, torch.zeros(3, 2, 16, 4).int()),
        "need slots int64",
    ),
    "words apart": (
        lambda t, n: paged_cuda.place_codes(
            torch.zeros(2, 2, 4).int(), n.long(), torch.zeros(3, 2, 16, 8).int()[..., ::2]
        ),
        "contiguous words in the pages",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
