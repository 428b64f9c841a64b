"""Searching keys in pages finds what searching the gathered keys finds."""

import hashcore
import numpy as np
import pytest
from hashcore import reference
from hashcore.cpu import threads
from hashcore_samples import assert_same, random_codes
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = [16, 32, 128, 1, 7, 48]  # the last three are laid out first
WORDS = [4, 4, 4, 1, 2, 3, 5]
PLANES = (1, 2, 4)
# Integers: tolerance 0 everywhere.


def pool_of(rng, pages: int, size: int, heads: int, words: int, *, heads_outside: bool, tail: int = 3) -> np.ndarray:
    """Codes [heads, pages, size, words] inside pages that have other words before and after them."""
    page = 5 + size * heads * words + tail
    memory = random_codes(rng, pages, page)
    codes = memory[:, 5 : 5 + size * heads * words]
    if heads_outside:  # a head's keys of a page side by side
        return codes.reshape(pages, heads, size, words).transpose(1, 0, 2, 3)
    return codes.reshape(pages, size, heads, words).transpose(2, 0, 1, 3)


def shuffled_tables(rng, lengths: np.ndarray, size: int, spare: int, shared: int) -> tuple[np.ndarray, int]:
    """Tables [B, T] of pages in no order, the first `shared` the same in all rows; what is behind the last is wrong."""
    needed = -(-lengths // size)
    width, pages = int(needed.max(initial=0)) + spare, int(needed.sum()) + 3
    free = rng.permutation(pages)
    tables = rng.choice([-1, pages, 2**30, -(2**31)], (len(lengths), width))
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
    common = min(shared, int(needed.min(initial=0)))
    tables[:, :common] = tables[:1, :common]
    return tables, pages


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_keys_in_pages_are_found_as_gathered_ones(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    batch, heads, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.sampled_from(SIZES))
    words, longest = data.draw(st.sampled_from(WORDS)), data.draw(st.sampled_from([0, 70, 1100, 2500]))
    lengths = rng.integers(0, longest + 1, batch)
    tables, pages = shuffled_tables(rng, lengths, size, data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3)))
    pool = pool_of(rng, pages, size, heads, words, heads_outside=data.draw(st.booleans()))
    query, weights = random_codes(rng, batch, heads, 3, words), data.draw(st.sampled_from([PLANES, None]))
    if data.draw(st.booleans()):  # few distinct scores, many ties
        query, pool = query & 3, pool & 3
    rows = (batch, 1) if weights else (batch, 1, 1)
    blocks = tables.reshape(*rows, -1).astype(data.draw(st.sampled_from([np.int32, np.int64])))
    ends = lengths.reshape(rows)
    k = np.minimum(ends, data.draw(st.sampled_from([0, 3, 30, 2500])))
    how = dict(order=data.draw(st.sampled_from(["best", "index"])), lengths=ends, starts=rng.integers(0, ends + 1))
    how |= dict(sink=data.draw(st.integers(0, 5)), recent=data.draw(st.integers(0, 3)))
    by_row = blocks if weights else blocks[:, :, 0]
    expected = reference.search(query, reference.gathered(pool, by_row), k, weights, **how)
    assert_same(hashcore.search(query, pool, k, weights, blocks=blocks, **how), expected)


@pytest.mark.parametrize("size", [16, 32, 128, 24])
@pytest.mark.parametrize("workers", [1, 3])
def test_long_rows_are_found_in_any_number_of_threads(rng, size, workers, monkeypatch):
    monkeypatch.setattr(threads, "GRAIN", 1)
    monkeypatch.setattr(threads, "most", lambda: workers)
    lengths = np.array([9000, 20_011, 4097])
    tables, pages = shuffled_tables(rng, lengths, size, 2, 5)
    pool = pool_of(rng, pages, size, 2, 4, heads_outside=True)
    query, blocks, ends = random_codes(rng, 3, 2, 3, 4), tables[:, None], lengths[:, None]
    how = dict(lengths=ends, sink=4, recent=1, order="index")
    expected = reference.search(query, reference.gathered(pool, blocks), ends // 50, PLANES, **how)
    assert_same(hashcore.search(query, pool, ends // 50, PLANES, blocks=blocks, **how), expected)


def test_a_sample_that_misleads_changes_nothing(rng):
    """As for keys that lie side by side: what the sampled runs promise, the others do not keep."""
    scores = np.tile(np.arange(20), 1000)
    for run in range(8):
        scores[run * (20_000 - 64) // 7 :][:64] = 128
    keys, query = hashcore.pack(np.arange(128) >= scores[:, None]), np.zeros((1, 4), np.int32)
    order = rng.permutation(20_000 // 32)
    pool = np.empty_like(keys).reshape(-1, 32, 4)
    pool[order] = keys.reshape(-1, 32, 4)
    assert_same(hashcore.search(query, pool, 3000, blocks=order), reference.search(query, keys, 3000))


def test_what_no_row_owns_is_not_read(rng):
    """Pages that no table names, and keys behind the last, may hold anything; shared pages are found by all."""
    tables, size = np.array([[3, 1, 4], [3, 5, 9]]), 32
    pool, lengths = random_codes(rng, 10, size, 4), np.array([70, 90])[:, None]
    query = random_codes(rng, 2, 1, 3, 4)
    search = dict(lengths=lengths, blocks=tables[:, None], order="index")
    before = hashcore.search(query, pool, 20, PLANES, **search)
    for page in (0, 2, 6, 7, 8):
        pool[page] = query[0, 0, 0]
    pool[4, 70 - 64 :], pool[9, 90 - 64 :] = query[0, 0, 0], query[1, 0, 0]
    assert_same(hashcore.search(query, pool, 20, PLANES, **search), before)


def test_tensors_and_out_are_taken(rng):
    torch = pytest.importorskip("torch", reason="torch is an optional extra of hashcore")
    pool, blocks = torch.from_numpy(random_codes(rng, 6, 16, 4)), torch.tensor([[5, 0, 2], [1, 5, 3]])
    query, out = (
        torch.from_numpy(random_codes(rng, 2, 3, 4)),
        (torch.empty(2, 7, dtype=torch.int32), torch.empty(2, 7).long()),
    )
    found = hashcore.search(query, pool, 7, PLANES, blocks=blocks, out=out)
    assert found is out
    expected = reference.search(query.numpy(), reference.gathered(pool.numpy(), blocks.numpy()), 7, PLANES)
    assert_same(found, expected)


POOL = np.zeros((3, 16, 4), np.int32)
QUERY = np.zeros((1, 4), np.int32)
REFUSED = {
    "a list": (dict(blocks=[0]), TypeError, "got blocks: list|array of page numbers, got list"),
    "floats": (dict(blocks=np.zeros(2)), TypeError, "must be int32 or int64 page numbers, got float64; convert"),
    "a scalar": (dict(blocks=np.array(0)), ValueError, r"shape \[..., T\], got a scalar"),
    "no such page": (dict(blocks=np.array([0, 3])), ValueError, r"must be pages in 0..2, got 3; shorten"),
    "page -1": (dict(blocks=np.array([-1])), ValueError, r"must be pages in 0..2, got -1; shorten"),
    "two tables": (dict(blocks=np.zeros((2, 1), int)), ValueError, r"one table per row, shape \[1, 'T'\], got \[2,"),
    "beyond": (dict(blocks=np.array([0]), lengths=17), ValueError, "lengths must be in 0..16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    how, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        hashcore.search(QUERY, POOL, 1, **how)


def test_keys_that_would_have_to_be_copied_are_refused():
    with pytest.raises(ValueError, match=r"contiguous and aligned.*copy the pages"):
        hashcore.search(QUERY, np.zeros((3, 16, 8), np.int32)[..., ::2], 1, blocks=np.array([0]))
    with pytest.raises(ValueError, match=r"shape \[..., M, S, W\], got \[16, 4\]"):
        hashcore.search(QUERY, POOL[0], 1, blocks=np.array([0]))


@pytest.mark.slow
def test_a_compiled_program_finds_the_same(rng):
    torch = pytest.importorskip("torch", reason="torch is an optional extra of hashcore")
    pool, query = torch.from_numpy(random_codes(rng, 6, 16, 4)), torch.from_numpy(random_codes(rng, 2, 3, 4))
    blocks, lengths = torch.tensor([[5, 0, 2], [1, 5, 3]]), torch.tensor([48, 30])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step():
        return hashcore.search(query, pool, 7, PLANES, blocks=blocks, lengths=lengths, order="index")

    gathered = reference.gathered(pool.numpy(), blocks.numpy())
    assert_same(step(), reference.search(query.numpy(), gathered, 7, PLANES, lengths=lengths.numpy(), order="index"))


def test_the_plan_of_others_is_left_alone(rng):
    """A kept plan serves calls with pages and without: none writes to it."""
    pool, query = random_codes(rng, 4, 16, 4), random_codes(rng, 1, 4)
    side_by_side = hashcore.search(query, pool.reshape(-1, 4), 5)
    hashcore.search(query, pool, 5, blocks=np.array([3, 2, 1, 0]))
    assert_same(hashcore.search(query, pool.reshape(-1, 4), 5), side_by_side)
