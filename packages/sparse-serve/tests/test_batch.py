"""Which rows of a step decode, and the copy of pages for prompts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from serve_engine import Impl
from sparse_decode.budget import LayerBudget
from sparse_decode.pages import tail_bytes
from sparse_serve.batch import Batch
from sparse_serve.layout import Moves, RowPages
from sparse_serve.served import Served
from sparse_serve.settings import Settings

SIZE = 32


def metadata(queries, lengths, pages=50):
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int()
    table, at = torch.full((len(queries), 5), -1, dtype=torch.int32), 0
    for row, n in enumerate(lengths):
        table[row, : -(-n // SIZE)] = order[at : at + -(-n // SIZE)]
        at += -(-n // SIZE)
    tokens = [(row, n - q + j) for row, (q, n) in enumerate(zip(queries, lengths, strict=True)) for j in range(q)]
    slots = torch.tensor([int(table[row, at // SIZE]) * SIZE + at % SIZE for row, at in tokens])
    seen = torch.tensor(lengths, dtype=torch.int32)
    return SimpleNamespace(query_start_loc=starts, seq_lens=seen, block_table=table, slot_mapping=slots)


class ByRows:
    """All pages are by rows."""

    def settle(self, table, used, new, sparse):
        return Moves(np.ones(len(table), bool), np.zeros(0, int), np.zeros(0, int))


def batch(queries, lengths, prefilling, held=None, budget=None):
    said = None if prefilling is None else torch.tensor(prefilling)
    given = SIZE, said, budget or LayerBudget(), lambda starts, lengths: "a schedule", held or ByRows()
    return Batch.of(metadata(queries, lengths), *given)


@pytest.mark.parametrize(
    ("queries", "lengths", "prefilling", "decoding", "prompts"),
    [
        ([1, 1], [40, 70], [False, False], [0, 1], None),
        ([1, 5, 1], [40, 70, 33], [False, True, False], [0, 6], [1, 2, 3, 4, 5]),
        ([1, 1], [40, 70], [False, True], [0], [1]),  # one token is left of a prompt
        ([1], [1], [False], [], [0]),  # a prompt of one token has no past
        ([3, 1], [90, 70], [False, False], [3], [0, 1, 2]),  # recomputed after a preemption
        ([4, 1], [4, 70], None, [4], [0, 1, 2, 3]),
        ([1, 0], [40, 0], [False, False], [0], None),  # a row of padding
    ],
)
def test_rows_are_told_apart(queries, lengths, prefilling, decoding, prompts):
    found = batch(queries, lengths, prefilling)
    assert found.rows.tolist() == decoding
    assert (found.prompts is None) == (prompts is None)
    if found.prompts is not None:
        assert torch.arange(sum(queries))[found.prompts.rows].tolist() == prompts
        assert found.prompts.schedule == "a schedule"
    if decoding:
        assert found.step(50, SIZE).spans[:, 2].tolist() == [
            n for n, at in zip(lengths, starts_of(queries), strict=True) if at in decoding
        ]


def test_rows_below_the_break_even_are_vllms():
    budget, held = LayerBudget(dense_below=60), RowPages()
    assert batch([1, 5], [40, 5], [False, True], held, budget).plain
    found = batch([1, 5, 1, 2], [40, 70, 70, 33], [False, True, False, True], held, budget)
    assert (found.plain, found.read) == (False, 40)
    assert found.rows.tolist() == [6]
    assert found.prompts is None
    given = metadata([1, 5, 1, 2], [40, 70, 70, 33])
    assert [x.tolist() for x in found.written] == [[6], given.slot_mapping[6:7].tolist()]
    assert found.stock.rows.tolist() == [0, 1, 2, 3, 4, 5, 7, 8]
    assert found.stock.slots.tolist() == given.slot_mapping.index_fill(0, torch.tensor([6]), -1).tolist()
    assert (found.stock.starts.tolist(), found.stock.lengths.tolist()) == ([0, 1, 6, 8], [40, 70, 33])
    assert torch.equal(found.stock.blocks, given.block_table[[0, 1, 3]])
    assert found.moves.moved.tolist() == given.block_table[2, :3].sort().values.tolist()


def starts_of(queries):
    return [sum(queries[:row]) for row in range(len(queries))]


def test_the_copy_holds_each_prompt_where_its_blocks_say():
    found = batch([3, 1, 40], [70, 45, 40], [True, False, True])
    given, prompts = metadata([3, 1, 40], [70, 45, 40]), found.prompts
    pool = torch.arange(50 * SIZE).float().view(50, 1, SIZE, 1)
    k, v = prompts.gather(pool, -pool)
    assert torch.equal(k, -v)
    copy = torch.full((prompts.pages * SIZE,), torch.nan)
    copy[prompts.slots] = k[:, 0, 0]
    for row, (source, n) in enumerate(((0, 70), (2, 40))):
        tokens = torch.arange(n)
        page, place = tokens // SIZE, tokens % SIZE
        expected = given.block_table[source].long()[page] * SIZE + place
        assert torch.equal(copy[prompts.blocks[row].long()[page] * SIZE + place].long(), expected)
    assert prompts.starts.tolist() == [0, 3, 43]
    assert prompts.lengths.tolist() == [70, 40]


@pytest.fixture
def served(tmp_path):
    Hasher(HasherConfig("lsh", ModelShape(3, 4, 2, 16), bits=64), 0).save_pretrained(tmp_path)
    return Served(Settings(str(tmp_path), dense_layers=(1,)))


def test_pages_are_views_of_the_engines_own(served):
    others = 4 * 2 * SIZE * 2 * 16
    page = others + tail_bytes(SIZE, 2, served._words, others)
    memory = torch.zeros(7, page // 4)
    cache = memory[:, : others // 4].view(7, 2, SIZE, 32)
    pages = served.pages(cache)
    pages.codes.fill_(-1)
    assert (memory[:, : others // 4] == 0).all()
    pages.k.fill_(1)
    pages.v.fill_(2)
    assert (pages.codes == -1).all()
    assert [x.shape for x in pages] == [(7, 2, SIZE, 16), (7, 2, SIZE, 16), (7, 2, SIZE, 2)]
    assert cache.unique().tolist() == [1, 2]


def test_a_page_without_room_for_codes_is_refused(served):
    with pytest.raises(ValueError, match="room for codes after its keys and values"):
        served.pages(torch.zeros(7, 2, SIZE, 32))


def test_hashers_are_float32_whatever_type_the_engine_makes_its_layers_in(served, tmp_path):
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = Served(Settings(str(tmp_path)))
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert {x.dtype for x in made.hasher.parameters()} | {made.hasher.layer(0).rotation.dtype} == {torch.float32}


def test_each_rank_hashes_its_own_heads_as_the_whole_does(served, tmp_path):
    k = torch.randn(9, 2, 16, generator=torch.Generator().manual_seed(1))
    whole = served.layer(0, Impl()).encode(k)
    for rank in range(2):
        part = Served(Settings(str(tmp_path)), rank, 2).layer(0, Impl())
        assert torch.equal(part.encode(k[:, rank : rank + 1]), whole[:, rank : rank + 1])
    assert not torch.equal(whole[:, 0], whole[:, 1])
