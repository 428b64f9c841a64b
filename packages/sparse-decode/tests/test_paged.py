"""Decoding over pages: equal, to the bit, to each row alone in one contiguous cache, whatever lies elsewhere."""

import numpy as np
import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode.budget import LayerBudget
from sparse_decode.hashers import QueryHeadHasher
from sparse_decode.layer.plan import AttentionArgs, LayerPlan, RowRule
from sparse_decode.pages import PagedLayer, Pages, Step, tail_bytes
from sparse_decode.select import HashSelector

HQ, HKV, DIM, BITS = 4, 2, 64, 128
SHAPE = ModelShape(2, HQ, HKV, DIM)
SIZES = [16, 32, 128]
BUDGETS = {
    "2 %": LayerBudget(0.02, min_tokens=8, sink=4, recent=1),
    "25 %": LayerBudget(0.25, sink=2, recent=3),
    "100 %": LayerBudget(1.0),
    "dense below": LayerBudget(0.1, dense_below=200),
    "no ends": LayerBudget(0.1, sink=0, recent=0),
}
LENGTHS = [1, 5, 100, 199, 200, 700, 1500]
DTYPES = [torch.bfloat16, torch.float32]
# Tolerance 0 everywhere: the kernels and the order of sums are the same.


def selector(variant="planes") -> HashSelector:
    return HashSelector(Hasher(HasherConfig(variant, SHAPE, bits=BITS), 0))


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
    """Rows of given lengths, the first `shared` pages of all rows the same, in a pool and each alone."""

    def __init__(self, lengths: list[int], size: int, dtype: torch.dtype, shared: int = 0, seed: int = 0):
        draw = torch.Generator().manual_seed(seed)
        needed = [-(-n // size) for n in lengths]
        self.size, self.lengths = size, lengths
        order = torch.randperm(sum(needed) + 5, generator=draw).tolist()
        self.memory, self.pages = pool(len(order), size, dtype)
        self.blocks = torch.full((len(lengths), max(needed) + 2), -7, dtype=torch.int32)
        prefix = torch.randn(3, shared * size, HKV, DIM, generator=draw).to(dtype)
        self.k, self.v = [], []
        for row, (n, count) in enumerate(zip(lengths, needed, strict=True)):
            mine = [order.pop() for _ in range(count)]
            k, v = torch.randn(2, n, HKV, DIM, generator=draw).to(dtype)
            if row and count > shared and needed[0] > shared:
                mine[:shared] = self.blocks[0, :shared].tolist()
                k[: shared * size], v[: shared * size] = self.k[0][: shared * size], self.v[0][: shared * size]
            elif not row:
                k[: shared * size], v[: shared * size] = prefix[0, :n], prefix[1, :n]
            self.blocks[row, :count] = torch.tensor(mine)
            self.k.append(k)
            self.v.append(v)
        self.free = order
        self.q = torch.randn(len(lengths), HQ, DIM, generator=draw).to(dtype)

    def fill(self, layer: PagedLayer) -> None:
        for row, n in enumerate(self.lengths):
            at = torch.arange(n)
            slots = self.blocks[row].long()[at // self.size] * self.size + at % self.size
            self.pages.write(slots, self.k[row], self.v[row], layer.encode(self.k[row]))

    def step(self, budget: LayerBudget) -> Step:
        return Step.of(self.blocks, torch.tensor(self.lengths), budget, len(self.pages.k), self.size)

    def alone(self, row: int, chosen: HashSelector, budget: LayerBudget) -> tuple[torch.Tensor, tuple[int, int]]:
        """The row as `attach` does it: one sequence, one contiguous cache, no mask."""
        k, v, q = (x.transpose(0, 1)[None] for x in (self.k[row], self.v[row], self.q[row][None]))
        plan = LayerPlan(1, chosen, budget, RowRule(None))
        inputs = AttentionArgs(q, k, v, None, chosen.encode_keys(1, k), None, DIM**-0.5, None, None)
        return plan.attend(inputs)[0][0, 0], plan.tally.totals()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BUDGETS)
def test_a_row_in_pages_is_the_row_alone(name, size, dtype):
    budget, chosen = BUDGETS[name], selector()
    layer, batch = PagedLayer(1, chosen, DIM**-0.5), Batch(LENGTHS, size, dtype, shared=2)
    batch.fill(layer)
    out = layer.decode(batch.q, batch.pages, batch.step(budget))
    assert out.dtype == dtype
    counted = [0, 0]
    for row, n in enumerate(LENGTHS):
        if n == 1:  # a row with no past: `attach` calls it a prompt
            assert torch.equal(out[row], batch.v[row][0].repeat_interleave(HQ // HKV, 0))
            counted = [x + HQ for x in counted]
            continue
        expected, counts = batch.alone(row, chosen, budget)
        assert torch.equal(out[row], expected), n
        counted = [x + y for x, y in zip(counted, counts, strict=True)]
    assert [layer.selected, layer.visible] == counted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_budgets_are_dense_attention(dtype):
    layer, batch = PagedLayer(1, selector(), DIM**-0.5), Batch([700, 33], 32, dtype)
    batch.fill(layer)
    out = layer.decode(batch.q, batch.pages, batch.step(LayerBudget(1.0)))
    for row in range(2):
        q, k, v = (x.float().transpose(0, 1)[None] for x in (batch.q[row][None], batch.k[row], batch.v[row]))
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0, :, 0]
        torch.testing.assert_close(out[row].float(), dense, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_not_selected_or_owned_is_not_read(size):
    """NaN in unselected keys and values, the best of codes in freed pages and behind the last token: all the same."""
    budget, chosen = BUDGETS["2 %"], selector()
    layer, batch = PagedLayer(1, chosen, DIM**-0.5), Batch([1500, 700], size, torch.float32)
    batch.fill(layer)
    step = batch.step(budget)
    clean = layer.decode(batch.q, batch.pages, step)
    picked = layer._choose(batch.q[:, :, None], batch.pages.codes, step)
    best = batch.pages.codes[batch.blocks[0, 0], 0, 0].clone()
    for page in batch.free:
        batch.pages.codes[page] = best
    for row, n in enumerate(batch.lengths):
        for head in range(HKV):
            read = {*range(4), n - 1, *(int(x) for x in picked[row, head, 0] if x >= 0)}
            for token in range(size * -(-n // size)):
                page, place = batch.blocks[row, token // size], token % size
                if token not in read:
                    batch.pages.k[page, head, place] = torch.nan
                    batch.pages.v[page, head, place] = torch.nan
                if token >= n:
                    batch.pages.codes[page, head, place] = best
    assert torch.equal(layer.decode(batch.q, batch.pages, step), clean)
    batch.pages.v[batch.blocks[0, 0], 0, 0] = torch.nan  # the sink: the poison would show
    assert layer.decode(batch.q, batch.pages, step).isnan().any()


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


@pytest.mark.parametrize(("size", "others"), [(16, 4096), (32, 65536), (128, 1 << 18)])
def test_a_page_holds_its_codes_in_an_odd_number_of_lines(size, others):
    tail = tail_bytes(size, HKV, 4, others)
    assert 16 * size * HKV <= tail < 16 * size * HKV + 2 * 64
    assert (others + tail) % 128 == 64


BATCH = Batch([40, 20], 16, torch.float32)
REFUSED = {
    "a page of none": (
        lambda: Step.of(BATCH.blocks + 99, torch.tensor([40, 20]), LayerBudget(), 10, 16),
        "pages in 0..9",
    ),
    "too long": (
        lambda: Step.of(BATCH.blocks, torch.tensor([40, 99]), LayerBudget(), 10, 16),
        "lengths must be in 1..80",
    ),
    "no token": (lambda: Step.of(BATCH.blocks, torch.tensor([40, 0]), LayerBudget(), 10, 16), "got 0..40"),
    "one length": (
        lambda: Step.of(BATCH.blocks, torch.tensor([40]), LayerBudget(), 10, 16),
        r"got \(2, 5\) and \(1,\)",
    ),
    "per query head": (
        lambda: PagedLayer(0, HashSelector(QueryHeadHasher(Hasher(HasherConfig("lsh", SHAPE, bits=BITS), 0))), 1.0),
        "need codes per KV head",
    ),
    "another type": (
        lambda: PagedLayer(0, selector(), 1.0).decode(BATCH.q.half(), BATCH.pages, BATCH.step(LayerBudget())),
        "q must be torch.float32",
    ),
    "a slot beyond": (
        lambda: BATCH.pages.write(torch.tensor([16 * 99]), BATCH.k[0][:1], BATCH.v[0][:1], torch.zeros(1, 2, 4).int()),
        "slots must be int64 in -1",
    ),
    "two keys": (
        lambda: BATCH.pages.write(torch.tensor([0]), BATCH.k[0][:2], BATCH.v[0][:1], torch.zeros(1, 2, 4).int()),
        r"k must be torch.float32 \(1, 2, 64\), got",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()


def test_rows_differ_in_what_they_read():
    step = BATCH.step(LayerBudget(0.1, min_tokens=1, sink=1, recent=1, dense_below=30))
    assert step.reads.tolist() == [[4], [20]]
    assert step.dense.tolist() == [False, True]
    np.testing.assert_array_equal(step.blocks[1, 2:], 0)
