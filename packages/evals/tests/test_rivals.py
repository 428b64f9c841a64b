"""Quest and MagicPIG against slow transcriptions of their definitions, and against cases worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from evals.methods import load_methods
from evals.rivals.magicpig import MagicPigSelector
from evals.rivals.quest import QuestSelector
from sparse_decode import Rows, attend

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def rows_of(n, counts, *, positions=None, pad=0, hq=4, hkv=2, dim=8, seed=0):
    """Random rows of one sequence, with `pad` invisible tokens before it."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(n) if positions is None else torch.tensor(positions)
    q = torch.randn(1, hq, len(positions), dim, generator=generator)
    k = torch.randn(1, hkv, n, dim, generator=generator)
    v = torch.randn(1, hkv, n, dim, generator=generator)
    k, v = (torch.cat([torch.full((1, hkv, pad, dim), 50.0), x], dim=2) for x in (k, v))
    interval = torch.stack([torch.full_like(positions, pad), positions + pad + 1], -1)
    counts = torch.as_tensor(counts).expand(len(positions)).minimum(positions + 1)
    return Rows(0, q, k, None, interval[None], counts[None], dim**-0.5), v


def quest_by_hand(rows, row, head, budget, page, min_pages, per_query_head):
    """One row of Quest with loops: a set of tokens."""
    n = int(rows.visible[0, 0, row].sum())
    group = rows.q.shape[1] // rows.k.shape[1]
    pages = [list(range(i, min(i + page, n))) for i in range(0, n, page)]
    heads = [head] if per_query_head else range(head * group, (head + 1) * group)
    scores = []
    for tokens in pages[:-1]:
        keys = rows.k[0, head // group if per_query_head else head, tokens]
        score = 0.0
        for h in heads:
            for d in range(keys.shape[1]):
                x = rows.q[0, h, row, d]
                score += max(x * keys[:, d].min(), x * keys[:, d].max()).item()
        scores.append(score)
    wanted = min(max(min_pages, budget // page), len(pages)) - 1
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[:wanted]
    return {token for i in best for token in pages[i]} | set(pages[-1])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("budget", "page", "min_pages", "per_query_head"), [(9, 4, 2, False), (20, 4, 3, True), (25, 16, 1, False)]
)
def test_quest_is_its_definition_in_every_row_and_behind_a_prompt_in_those_behind_it(
    budget, page, min_pages, per_query_head
):
    published = QuestSelector(per_query_head, page, min_pages=min_pages)
    for selector, first in (
        (QuestSelector(per_query_head, page, dense_rows=0, min_pages=min_pages), 0),
        (published.after_prompt(10), 10),
    ):
        rows, _ = rows_of(50, budget, positions=range(first, 50))
        found = selector.select(rows)
        with_ends = replace(rows, counts=(rows.counts - 3).clamp(min=0), sink=2, recent=1)  # as part of the budget
        last, same = (x[..., -1, :] for x in (selector.select(with_ends), found))
        assert torch.equal(last[last >= 0], same[same >= 0])
        assert found.shape[1] == (4 if per_query_head else 2)
        for head in range(found.shape[1]):
            for row in range(max(0, budget + 1 - first), 50 - first):
                chosen = {int(j) for j in found[0, head, row] if j >= 0}
                assert chosen == quest_by_hand(rows, row, head, budget, page, min_pages, per_query_head)
    dense = published.select(rows_of(50, 9)[0])
    assert (dense >= 0).sum(-1)[0, 0].tolist() == list(range(1, 51))  # its first 128 rows
    assert torch.equal(published.select(replace(rows_of(50, 0)[0], sink=4, recent=4)), dense)  # all is always read


SELECTORS = {
    "quest": lambda: QuestSelector(page=4, dense_rows=8),
    "quest-heads": lambda: QuestSelector(True, page=4, dense_rows=8),
    "magicpig": lambda: MagicPigSelector(2, 3, sink=1, local=2, prefill=8),
    "magicpig-bare": lambda: MagicPigSelector(2, 3, sink=0, local=0, prefill=8),
}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", SELECTORS)
def test_a_sequence_that_is_not_finite_leaves_the_others_alone(name, bad):
    def found(number):
        rows, v = rows_of(50, 9)
        q, k, values = (torch.cat([x, x.flip(-2)]) for x in (rows.q, rows.k, v))
        for x in (q, k, values):
            x[1, :, ::5, 2] = number
        both = replace(rows, q=q, k=k, counts=rows.counts.expand(2, -1), interval=rows.interval.expand(2, -1, -1))
        selector = SELECTORS[name]()
        indices = selector.select(both)
        own = getattr(selector, "attend", None)
        out = own(both, values, indices) if own else attend(q, k, values, indices, 1.0)
        return {int(j) for j in indices[0].flatten()}, out[0]

    (tokens, out), (others, expected) = found(bad), found(1.0)
    assert tokens == others
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", SELECTORS)
def test_padding_changes_nothing_first_rows_and_whole_budgets_take_all_and_idle_rows_nothing(name):
    selector = SELECTORS[name]()
    found, moved = (SELECTORS[name]().select(rows_of(40, 5, pad=pad)[0]) for pad in (0, 7))
    assert torch.equal(found, torch.where(moved < 0, moved, moved - 7))
    for rows in (rows_of(8, 1)[0], rows_of(40, 40)[0]):
        taken = (selector.select(rows) >= 0).sum(-1)
        assert (taken == torch.arange(1, taken.shape[-1] + 1)).all()
    assert (selector.select(rows_of(40, 0)[0]) < 0).all()


def magicpig_by_hand(selector, prompt, rows, v, row, head):
    """One row of MagicPIG after `prompt` dense tokens with loops and sets: the tokens, and the output."""
    n = int(rows.visible[0, 0, row].sum())
    kv = head // (rows.q.shape[1] // rows.k.shape[1])
    inner = range(selector.sink, prompt - selector.local)
    mean = sum(rows.k[0, kv, j] for j in inner) / len(inner) if inner else torch.zeros(rows.k.shape[-1])
    generator = torch.Generator().manual_seed(selector.seed * 1_000_003)
    planes = torch.randn(rows.q.shape[-1], selector.tables * selector.bits, generator=generator)

    def bucket(x, table):
        return tuple(bool(x @ planes[:, table * selector.bits + i] > 0) for i in range(selector.bits))

    q = rows.q[0, head, row]
    weights, values = [], []
    tokens = set()
    for j in range(n):
        key = rows.k[0, kv, j] - mean
        kept = j < selector.sink or j >= n - selector.local
        hits = sum(bucket(q, t) == bucket(key, t) for t in range(selector.tables))
        if not kept and hits < 2:
            continue
        tokens.add(j)
        logit = float(q @ rows.k[0, kv, j]) * rows.scaling
        if not kept:
            angle = math.acos(float(q @ key / (q.norm() * key.norm())))
            shared = (1 - angle / math.pi) ** selector.bits
            tables = selector.tables
            logit -= math.log(1 - (1 - shared) ** tables - tables * shared * (1 - shared) ** (tables - 1))
        weights.append(math.exp(logit))
        values.append(v[0, kv, j])
    out = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights) if weights else None
    return tokens, out


@pytest.mark.sample(2)
@pytest.mark.parametrize(("prompt", "sink", "local"), [(None, 0, 0), (10, 1, 2), (25, 1, 2), (25, 2, 0)])
def test_magicpig_is_its_definition_also_behind_a_prompt_by_which_it_is_centred(sink, local, prompt):
    """Its prefill of 1,024 would leave each of these rows whole."""
    published = MagicPigSelector(3, 6, sink=sink, local=local, seed=4)
    assert (published.prefill, published.sampled) == (1024, 0)
    own = MagicPigSelector(3, 6, sink=sink, local=local, prefill=10, seed=4)
    selector = own if prompt is None else published.after_prompt(prompt)
    positions = range(prompt or 10, 40, 3)
    rows, v = rows_of(40, 1, positions=positions)
    found = selector.select(rows)
    out = selector.attend(rows, v, found)
    checked = 0
    for head in range(4):
        for row in range(len(positions)):
            tokens, expected = magicpig_by_hand(selector, prompt or 10, rows, v, row, head)
            if tokens:
                assert {int(j) for j in found[0, head, row] if j >= 0} == tokens
                torch.testing.assert_close(out[0, row, head], expected, **CLOSE)
                checked += 1
    assert checked > 3 * len(positions)  # at least three of four draw something


def test_an_empty_sample_attends_to_its_own_token_and_is_counted():
    rows, v = rows_of(40, 5)
    selector = MagicPigSelector(31, 2, sink=0, local=0, prefill=8)
    found = selector.select(rows)
    assert torch.equal(found[..., 8:, 0], torch.arange(8, 40).expand(1, 4, 32))
    assert (selector.sampled, selector.empty) == (4 * 32, 4 * 32)
    torch.testing.assert_close(selector.attend(rows, v, found)[0, 39, 3], v[0, 1, 39], **CLOSE)


PUBLISHED = {"quest": "page16", "quest-heads": "page16", "quest-page4": "page4", "quest-heads-page4": "page4"}
PUBLISHED |= {"magicpig": "bits15-tables100-4-64-1024-0", "magicpig-sink": "bits15-tables100-4-0-1024-0"}
PUBLISHED |= {"magicpig-local": "bits15-tables100-0-64-1024-0", "magicpig-bare": "bits15-tables100-0-0-1024-0"}
PUBLISHED |= {"magicpig-10x150": "bits10-tables150-4-64-1024-0"}
"""The parameters as published: those that an identity tells; MagicPIG's ends with the rows left dense, and its seed."""


def test_rivals_have_their_published_parameters():
    assert {x: load_methods([x], None, None)[0].identity.removeprefix(f"{x}-") for x in PUBLISHED} == PUBLISHED
