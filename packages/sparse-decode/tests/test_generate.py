"""Generation: at a budget of 100 % it is dense; at 10 % every law holds at every step."""

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_decode import Budget, HashSelector, OracleSelector, RecentSelector, attach
from sparse_decode.attach import attach_rows
from sparse_decode.budget import LayerBudget
from sparse_decode_doubles import (
    FAMILIES,
    QUICK,
    Auditor,
    PaperLikeHasher,
    SignHasher,
    generate,
    prompts,
    slow_but,
    tiny_model,
)
from transformers import DynamicCache

WAYS = {"greedy": {}, "beam": {"num_beams": 3}, "sampling": {"do_sample": True}}
TENTH = Budget(0.1, min_tokens=2, sink=0, recent=0)
EVERY_SELECTOR = {
    "planes": SignHasher(),
    "paper": PaperLikeHasher(),
    "oracle": OracleSelector(),
    "oracle per query head": OracleSelector(per_query_head=True),
    "recent": RecentSelector(),
}


def run(model, ids, mask=None, **options):
    torch.manual_seed(5)
    return generate(model, ids, mask, **options)


FIRST = next(iter(WAYS))
QUICKLY = [(family, way) for family in QUICK for way in WAYS]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("family", "way"), slow_but(QUICKLY, [*QUICKLY, *((x, FIRST) for x in FAMILIES if x not in QUICK)])
)
def test_a_full_budget_is_dense_token_for_token(family, way):
    model, (ids, mask) = tiny_model(family), prompts()
    dense = run(model, ids, mask, **WAYS[way])
    with attach(model, SignHasher(), Budget(1.0)) as attachment:
        assert torch.equal(run(model, ids, mask, **WAYS[way]), dense)
        assert attachment.density() == dict.fromkeys(attachment.layers, 1.0)
        assert 3 in attachment.layers
    with attach(model, SignHasher(), Budget(0.03)):
        assert not torch.equal(run(model, ids, mask, **WAYS[way]), dense), "too easy a case to tell"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("selector", EVERY_SELECTOR)
def test_every_step_keeps_the_laws(selector, way, implementation, monkeypatch):
    model, (ids, mask) = tiny_model(implementation=implementation), prompts()
    auditor = Auditor(monkeypatch)
    with attach(model, EVERY_SELECTOR[selector], TENTH):
        run(model, ids, mask, new_tokens=6, **WAYS[way])
    assert auditor.steps == auditor.padded == 4 * 5  # four layers, all but the first new token
    for visible, selected in auditor.sizes:
        assert torch.equal(selected, 4 * (visible // 10).clamp(min=2).flatten())  # of four query heads


def test_a_padded_row_is_the_row_alone():
    model, lengths = tiny_model(), (40, 27, 33)
    ids, mask = prompts(lengths)
    with attach(model, SignHasher(), Budget(0.1, sink=2, recent=3)) as attachment:
        together = run(model, ids, mask)
        batched = attachment.counts()
        attachment.reset_density()
        for row, length in enumerate(lengths):
            alone = run(model, ids[row : row + 1, max(lengths) - length :])
            assert torch.equal(alone[0], together[row, max(lengths) - length :])
        assert attachment.counts() == batched


def test_padding_counts_for_nothing_without_its_mask(monkeypatch):
    """The test above would pass on a model whose padding is harmless; this one shows that it is not."""
    model, (ids, mask) = tiny_model(), prompts()
    with attach(model, SignHasher(), TENTH):
        assert not torch.equal(run(model, ids, mask), run(model, ids))


BUDGETS = st.builds(
    LayerBudget,
    fraction=st.sampled_from([0.001, 0.1, 0.5, 1.0]),
    min_tokens=st.integers(1, 4),
    max_tokens=st.none() | st.integers(4, 6),
    sink=st.integers(0, 3),
    recent=st.integers(0, 3),
    of=st.sampled_from(["visible", "length"]),
    dense_below=st.sampled_from([0, 3, 100]),
)
SMALL = tiny_model("gpt_oss", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])


@settings(max_examples=30, deadline=None)
@given(
    BUDGETS,
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([SignHasher(), OracleSelector(True), RecentSelector()]),
)
def test_any_context_any_batch_and_any_budget_work(budget, lengths, rows, selector):
    ids, mask = prompts(lengths)
    with torch.no_grad(), attach_rows(SMALL, selector, budget, dense_layers=0, sparse_rows=rows):
        cache = DynamicCache(config=SMALL.config)
        for first, last in ((0, max(lengths)), (0, 1), (0, 2)):
            ids_now, mask = (
                (ids, mask)
                if not cache.get_seq_length()
                else (ids[:, first:last], torch.nn.functional.pad(mask, (0, ids[:, first:last].shape[1]), value=1))
            )
            logits = SMALL(ids_now, attention_mask=mask, past_key_values=cache).logits
            assert logits[mask[:, -ids_now.shape[1] :].bool()].isfinite().all()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_short_contexts_are_dense_at_a_full_budget(length):
    model = tiny_model()
    ids, mask = prompts((length, 1))
    dense = model(ids, attention_mask=mask).logits
    for rows in (None, 0, 2):
        with attach_rows(model, SignHasher(), Budget(1.0, sink=4, recent=4), sparse_rows=rows):
            assert generate(model, ids, mask, new_tokens=4).shape == (2, length + 4)
            logits = model(ids, attention_mask=mask).logits
            torch.testing.assert_close(logits[:, -1], dense[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (40, {"prompt_lookup_num_tokens": 4}),
        (None, {"prefill_chunk_size": 16}),
        (40, {"prefill_chunk_size": 13}),  # a last chunk of one token, told from decoding by its position
    ],
)
def test_assisted_decoding_and_chunked_prefill_give_the_greedy_tokens(rows, options, monkeypatch):
    model, (ids, _) = tiny_model(), prompts((40,))
    auditor = Auditor(monkeypatch)
    with attach(model, SignHasher(), TENTH):
        greedy = run(model, ids, new_tokens=20)
    alone = auditor.steps
    with attach_rows(model, SignHasher(), TENTH, sparse_rows=rows):
        assert torch.equal(run(model, ids, new_tokens=20, **options), greedy)
    assert auditor.steps > alone


def test_a_whole_generation_hashes_each_key_once():
    class Counting(SignHasher):
        tokens = 0

        def encode_keys(self, layer, k):
            self.tokens += k.shape[2]
            return super().encode_keys(layer, k)

    model, (ids, _), hasher = tiny_model(), prompts((40,)), Counting()
    with attach(model, hasher, TENTH):
        run(model, ids, new_tokens=8)
    assert hasher.tokens == 4 * (40 + 7)


def test_a_copied_prefix_cache_and_one_filled_before_attaching(monkeypatch):
    model, (ids, _) = tiny_model(), prompts((40,))
    early = DynamicCache(config=model.config)
    model(ids[:, :30], past_key_values=early)
    Auditor(monkeypatch)
    with attach(model, SignHasher(), TENTH):
        whole = run(model, ids)
        assert torch.equal(run(model, ids, past_key_values=early), whole)
        prefix = DynamicCache(config=model.config)
        model(ids[:, :30], past_key_values=prefix)
        for _ in range(2):
            assert torch.equal(run(model, ids, past_key_values=copy.deepcopy(prefix)), whole)


def test_a_cache_goes_on_dense_after_detaching_and_with_another_hasher(monkeypatch):
    model, (ids, _) = tiny_model(), prompts((40,))
    dense = run(model, ids)
    cache = DynamicCache()
    with attach(model, SignHasher(), TENTH):
        model(ids[:, :20], past_key_values=cache)
        assert type(cache.layers[2]).__name__ == "CodedDynamicLayer"
    assert {type(layer).__name__ for layer in cache.layers} == {"DynamicLayer"}
    Auditor(monkeypatch)
    with attach(model, SignHasher(seed=1), TENTH):
        other = run(model, ids)
        model(ids[:, 20:25], past_key_values=cache)
        assert torch.equal(run(model, ids, past_key_values=copy.deepcopy(cache)), other)
    assert torch.equal(run(model, ids, past_key_values=cache), dense)


def test_two_models_in_one_process():
    models = [tiny_model("llama"), tiny_model("qwen3", num_attention_heads=8)]
    ids, mask = prompts()
    apart = []
    for model in models:
        with attach(model, SignHasher(), TENTH):
            apart.append(run(model, ids, mask))
    with attach(models[0], SignHasher(), TENTH) as first, attach(models[1], SignHasher(), TENTH) as second:
        for model, expected in zip(models, apart, strict=True):
            assert torch.equal(run(model, ids, mask), expected)
        assert 2 * first.counts()[2][1] == second.counts()[2][1] > 0  # counted by query head


def test_one_model_from_two_threads(monkeypatch):
    model = tiny_model()
    batches = [prompts((40,), seed)[0] for seed in range(3)]
    Auditor(monkeypatch)
    found = {}

    def work(index):
        with torch.no_grad():
            found[index] = [generate(model, batches[index], new_tokens=8) for _ in range(2)]

    with attach(model, HashSelector(SignHasher()), TENTH):
        expected = [generate(model, ids, new_tokens=8) for ids in batches]
        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index, tokens in enumerate(expected):
        assert all(torch.equal(tokens, again) for again in found[index])
