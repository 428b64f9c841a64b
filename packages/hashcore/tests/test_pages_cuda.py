"""Searching keys in pages on CUDA finds what searching the gathered keys finds; under the host simulator.

Pages without an owner, and keys after a row's last, would score best. Pool, tables and results lie between guard pages.
"""

import numpy as np
import pytest
from hashcore import reference
from hashcore_samples import random_codes, shuffled_tables
from hostsim import guarded
from hypothesis import given, settings
from hypothesis import strategies as st

simulated = pytest.importorskip("simulated", reason="needs torch and g++")
import hashcore  # noqa: E402
from hashcore.cuda import operands, tensor_search  # noqa: E402

torch = simulated.torch

PLANES = (1, 2, 4)
SIZES = [16, 32, 128, 1, 8, 64]
# Words and weights: the hashers' codes, one word, a number of words without vectors, four lanes a key, codes longer
# than a thread holds.
SCORES = [(4, PLANES), (4, PLANES), (1, (1, 2)), (3, (5, 1)), (16, PLANES), (9, (1, 2))]


class Pool:
    """Keys of B sequences and H heads in shuffled pages with other words around them, as an engine lays them."""

    def __init__(self, rng, lengths, size, heads, words, shared=0, heads_outside=True, kind=np.int32):
        self.lengths, self.size = np.asarray(lengths), size
        self.tables, pages = shuffled_tables(rng, self.lengths, size, 2, shared)
        unit = np.gcd(words, 4)
        room, page = 4 * unit, size * heads * words
        memory = guarded(random_codes(rng, pages, room + page + unit))
        inside = memory[:, room : room + page]
        if heads_outside:  # a head's keys of a page side by side
            self.codes = inside.reshape(pages, heads, size, words).transpose(1, 0, 2, 3)
        else:
            self.codes = inside.reshape(pages, size, heads, words).transpose(2, 0, 1, 3)
        self.blocks = simulated.inside(self.tables.astype(kind), 8)

    def poison(self, query) -> None:
        """Give the best of codes to what no row sees: pages without an owner, keys behind the last, words between."""
        owned = np.zeros(self.codes.shape[1:3], bool)
        for table, length in zip(self.tables, self.lengths, strict=True):
            at = np.arange(length)
            owned[table[at // self.size], at % self.size] = True
        best = query.reshape(-1, *query.shape[-2:])[0, -1]
        self.codes[:, ~owned] = best

    def gathered(self):
        """Keys [B, H, N, W]."""
        return reference.gathered(self.codes, self.tables[:, None])


def search(query, pool, k, weights, device, lengths, starts=None, sink=0, recent=0, width=None):
    """Search planes [B, H, P, W] of a pool."""
    width = int(np.max(k)) if width is None else width
    values = simulated.empty(*query.shape[:2], width)
    indices = simulated.empty(*query.shape[:2], width, dtype=np.int64)
    bounds = operands.Bounds(*(simulated.tensor_or(x) for x in (lengths, starts)), sink, recent)
    how = {"run": device, "blocks": pool.blocks[:, None]}
    asked = simulated.inside(query), torch.from_numpy(pool.codes), simulated.tensor_or(k), weights
    tensor_search.search(*asked, bounds, values, indices, **how)
    return values, indices


@settings(deadline=None, max_examples=40)
@given(st.data(), simulated.orders())
def test_keys_in_pages_are_found_as_gathered_ones(data, device):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    batch, heads, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.sampled_from(SIZES))
    (words, weights), longest = data.draw(st.sampled_from(SCORES)), data.draw(st.sampled_from([70, 1100, 2500]))
    lengths = rng.integers(0, longest + 1, batch)
    lengths[0] = longest
    kind = data.draw(st.sampled_from([np.int32, np.int64]))
    outside = data.draw(st.booleans())
    pool = Pool(rng, lengths, size, heads, words, data.draw(st.integers(0, 3)), outside, kind)
    query = random_codes(rng, batch, heads, len(weights), words)
    pool.poison(query)
    ends = lengths[:, None].astype(kind)
    k = np.minimum(ends, data.draw(st.sampled_from([3, 30, 2500])))
    ranges = dict(lengths=ends, starts=rng.integers(0, ends + 1).astype(kind))
    ranges |= dict(sink=data.draw(st.integers(0, 5)), recent=data.draw(st.integers(0, 3)))
    expected = reference.search(query, pool.gathered(), k, weights, order="index", **ranges)
    simulated.assert_same(search(query, pool, k, weights, device, **ranges), expected)


@pytest.mark.parametrize(("heads", "kernel"), [(1, "list_candidates"), (2, "list_candidates_shared")])
def test_queries_over_the_same_pages_read_them_together(rng, heads, kernel):
    """Q queries without weights, over the pages of their sequence; with one head, they are a line with others."""
    lengths = np.array([900, 333])
    pool, query = Pool(rng, lengths, 16, heads, 4), random_codes(rng, 2, heads, 5, 4)
    values, indices = simulated.empty(2, heads, 5, 9), simulated.empty(2, heads, 5, 9, dtype=np.int64)
    device, bounds = simulated.Device(), operands.Bounds(torch.from_numpy(lengths[:, None, None]))
    how = {"run": device, "blocks": pool.blocks[:, None, None]}
    asked = simulated.inside(query), torch.from_numpy(pool.codes), 9, None
    tensor_search.search(*asked, bounds, values, indices, **how)
    ranges = dict(lengths=lengths[:, None, None], order="index")
    simulated.assert_same((values, indices), reference.search(query, pool.gathered(), 9, None, **ranges))
    assert device.kernels[0] == kernel


def test_page_numbers_out_of_range_read_nothing_outside_the_pool(rng):
    """A caller's error, which the host cannot see: the guard pages are not touched."""
    pool, query = Pool(rng, np.array([300]), 32, 1, 4), random_codes(rng, 1, 1, 3, 4)
    pages = pool.codes.shape[1]
    clamped = pool.tables.copy()
    for wrong in (-1, pages, 2**31 - 1, -(2**31)):
        pool.blocks[0, 2], clamped[0, 2] = wrong, pages - 1
        expected = reference.gathered(pool.codes, clamped[:, None])
        expected = reference.search(query, expected, 300, PLANES, lengths=np.array([[300]]), order="index")
        simulated.assert_same(search(query, pool, 300, PLANES, simulated.Device(), np.array([[300]])), expected)


def test_a_table_for_each_row_needs_no_copies(rng):
    tables = torch.from_numpy(rng.integers(0, 9, (4, 20)).astype(np.int32))
    lead = (3, 2, 5)
    for blocks, width, per in (
        (tables[:3, None, None, :7], 20, 10),  # an engine's table has room for more
        (tables[:1, :7], 0, 30),
        (tables[0], 0, 30),
        (tables[:3].repeat_interleave(2, 0).view(3, 2, 1, 20), 20, 5),
    ):
        found = operands.page_tables(blocks, lead)
        assert (found.blocks.data_ptr(), found.width, found.per) == (blocks.data_ptr(), width, per)
    for blocks in (tables[:2, None], tables[:3, None, None].long(), tables[:3, None, None, ::2]):
        found = operands.page_tables(blocks, lead)
        expected = torch.broadcast_to(blocks, (*lead, blocks.shape[-1])).reshape(30, -1)
        rows = torch.arange(30) // found.per
        ours = torch.stack([found.blocks.flatten()[r * found.width :][: blocks.shape[-1]] for r in rows])
        assert torch.equal(ours, expected.int())


REFUSED = {
    "24 keys": (lambda: (torch.zeros(3, 24, 4).int(), torch.zeros(1).int()), "power of two of keys, got 24"),
    "no page": (lambda: (torch.zeros(0, 16, 4).int(), torch.zeros(1).int()), "at least one page, got none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    make, words = REFUSED[name]
    pool, blocks = (x.to("meta") for x in make())
    with pytest.raises((ValueError, TypeError), match=words):
        hashcore.search(torch.zeros(1, 4).int().to("meta"), pool, 1, blocks=blocks)


def test_keys_that_would_have_to_be_copied_are_refused(rng):
    pool, query = Pool(rng, np.array([300]), 32, 1, 4), random_codes(rng, 1, 1, 3, 4)
    memory = np.zeros((1, pool.codes.shape[1], 32 * 4 + 1), np.int32)
    pool.codes = np.lib.stride_tricks.as_strided(memory, pool.codes.shape, (memory.nbytes, 129 * 4, 16, 4))
    with pytest.raises(ValueError, match=r"aligned to 16 bytes, got strides .*copy the pages"):
        search(query, pool, 20, PLANES, simulated.Device(), np.array([[300]]))


def test_rows_with_other_tables_are_no_group(rng):
    """With one head, sequences differ in their tables alone; keys of one must not be scored for another."""
    lengths = np.array([500, 400, 300])
    pool, query, device = Pool(rng, lengths, 32, 1, 4), random_codes(rng, 3, 1, 3, 4), simulated.Device()
    found = search(query, pool, 20, PLANES, device, lengths[:, None])
    ranges = dict(lengths=lengths[:, None], order="index")
    simulated.assert_same(found, reference.search(query, pool.gathered(), 20, PLANES, **ranges))
    assert device.kernels[0] == "list_candidates"
