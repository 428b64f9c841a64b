"""Generation in every way, with every kind of cache: dense at a budget of 100 %, and always the same tokens."""

import copy
import threading

import pytest
import sparse_decode_doubles as doubles
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_decode import Attachment, Budget, HashSelector, OracleSelector, RecentSelector, attach
from sparse_decode.budget import LayerBudget
from sparse_decode_doubles import QUICK, Auditor, Calibrated, SignHasher, generate, prompts, tiny_model
from transformers import DynamicCache, StaticCache

WAYS = {"greedy": {}, "beam": {"num_beams": 3}, "sampling": {"do_sample": True}}
TENTH = Budget(0.1, min_tokens=2, sink=1, recent=2)
HASHERS = {"planes": SignHasher(), "remainder": Calibrated(), "paper": doubles.PaperLikeHasher()}
SHAPE = ModelShape.of(tiny_model().config)
SELECTORS = HASHERS | {
    "lsh": Hasher(HasherConfig("lsh", SHAPE)),
    "paper per query head": HashSelector(Hasher(HasherConfig("paper", SHAPE)), per_query_head=True),
    "oracle": OracleSelector(),
    "oracle per query head": OracleSelector(per_query_head=True),
    "recent": RecentSelector(),
}
BOTH = pytest.mark.parametrize("hasher", [SignHasher(), Calibrated()], ids=["plain", "remainder"])


def run(model, ids, mask=None, **options):
    torch.manual_seed(5)
    return generate(model, ids, mask, **options)


def padded(lengths):
    """A batch whose padding holds words: padding tokens have keys of zero, which nothing would select."""
    ids, mask = prompts(lengths)
    words = torch.randint(3, doubles.VOCABULARY, ids.shape, generator=torch.Generator().manual_seed(8))
    return torch.where(mask.bool(), ids, words), mask


def make_cache(kind, model):
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=80)
    return DynamicCache(config=model.config)


CASES = [*((x, way) for x in QUICK for way in WAYS), *((x, "greedy") for x in doubles.FAMILIES if x not in QUICK)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "way"), CASES)
def test_a_full_budget_is_dense_token_for_token(family, way):
    model, (ids, mask) = tiny_model(family), prompts()
    dense = run(model, ids, mask, **WAYS[way])
    for hasher in (SignHasher(), Calibrated()):
        with attach(model, hasher, Budget(1.0)) as attachment:
            assert torch.equal(run(model, ids, mask, **WAYS[way]), dense)
            assert attachment.density() == dict.fromkeys(attachment.layers, 1.0)
            assert 3 in attachment.layers
    with attach(model, SignHasher(), Budget(0.03)):
        assert not torch.equal(run(model, ids, mask, **WAYS[way]), dense), "too easy a case to tell"


LAWS = [*((name, "greedy") for name in SELECTORS), ("planes", "beam"), ("remainder", "beam"), ("remainder", "sampling")]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("selector", "way"), LAWS)
def test_every_step_keeps_the_laws(selector, way, monkeypatch):
    """Keys and values that no row sees or selected, and those of padding, may be NaN."""
    model, (ids, mask) = tiny_model(), padded((40, 27, 33))
    auditor = Auditor(monkeypatch)
    with attach(model, SELECTORS[selector], Budget(0.1, min_tokens=2, sink=0, recent=0)) as attachment:
        run(model, ids, mask, new_tokens=6, **WAYS[way])
    assert auditor.steps == auditor.padded == 4 * 5  # four layers, all but the first new token
    for visible, read in auditor.sizes:
        assert torch.equal(read, 4 * (visible.flatten() // 10).clamp(min=2))  # of four query heads
    if way == "greedy":
        seen = [n + step for n in (40, 27, 33) for step in range(1, 6)]
        counts = 4 * sum(max(2, n // 10) for n in seen), 4 * sum(seen)
        assert attachment.counts() == dict.fromkeys(range(4), counts)


@pytest.mark.sample(2)
@BOTH
@pytest.mark.parametrize("below", [0, 38])
def test_a_padded_row_is_the_row_alone_and_dense_until_it_sees_enough(hasher, below):
    model, lengths = tiny_model(), (40, 27, 33)
    ids, mask = padded(lengths)
    budget = LayerBudget(0.1, min_tokens=2, sink=1, recent=2, dense_below=below)
    with attach(model, hasher, budget) as attachment:
        together = run(model, ids, mask, new_tokens=12)
        batched = attachment.counts()
        attachment.reset_density()
        for row, length in enumerate(lengths):
            alone = run(model, ids[row : row + 1, 40 - length :], new_tokens=12)
            assert torch.equal(alone[0], together[row, 40 - length :])
        assert attachment.counts() == batched
        seen = [n + step for n in lengths for step in range(1, 12)]
        read = sum(n if n < below else max(3, n // 10) for n in seen)
        assert batched[2] == (4 * read, 4 * sum(seen))
        assert below or not torch.equal(run(model, ids, new_tokens=12), together), "padding is not harmless"


BUDGETS = st.builds(
    LayerBudget,
    fraction=st.sampled_from([0.001, 0.1, 0.5, 1.0]),
    min_tokens=st.integers(1, 4),
    max_tokens=st.none() | st.integers(4, 6),
    sink=st.integers(0, 3),
    recent=st.integers(0, 3),
    dense_below=st.sampled_from([0, 3, 100]),
)
SMALL = tiny_model("gpt_oss", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])


@settings(max_examples=30, deadline=None)
@given(
    BUDGETS,
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([SignHasher(), Calibrated(), OracleSelector(True), RecentSelector()]),
)
def test_any_context_any_batch_and_any_budget_work(budget, lengths, rows, selector):
    """Dense where the budget is the whole context."""

    def logits():
        cache, (ids, mask), found = DynamicCache(config=SMALL.config), prompts(lengths), []
        for new in (ids, ids[:, :1], ids[:, :2]):
            mask = torch.nn.functional.pad(mask, (0, new.shape[1] if found else 0), value=1)
            out = SMALL(new, attention_mask=mask, past_key_values=cache).logits
            found.append(out[mask[:, -new.shape[1] :].bool()])
        return torch.cat(found)

    with torch.no_grad():
        dense = logits()
        with Attachment(SMALL, selector, budget, dense_layers=0, sparse_rows=rows):
            found = logits()
    assert found.isfinite().all()
    if budget.fraction == 1 and budget.max_tokens is None:
        torch.testing.assert_close(found, dense, atol=1e-4, rtol=1e-4)


CACHES = [
    *(("static", selector, "llama") for selector in SELECTORS),
    *(("host", hasher, "llama") for hasher in HASHERS),
    *((kind, "planes", family) for kind in ("static", "host") for family in ("gpt_oss", "gemma3")),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "selector", "family"), CACHES)
@pytest.mark.parametrize("way", WAYS)
def test_other_caches_give_the_tokens_and_counts_of_a_dynamic_one(selector, kind, way, family, monkeypatch):
    host = kind == "host"
    model, (ids, mask) = tiny_model(family), prompts()
    with attach(model, SELECTORS[selector], TENTH) as attachment:
        expected, counts = run(model, ids, mask, **WAYS[way]), attachment.counts()
    with attach(model, SELECTORS[selector], TENTH, kv="host" if host else "device") as attachment:
        auditor, cache = Auditor(monkeypatch), make_cache(kind, model)
        assert torch.equal(run(model, ids, mask, past_key_values=cache, **WAYS[way]), expected)
        assert attachment.counts() == counts
        assert auditor.steps == auditor.padded == 15 * len(attachment.layers)
    assert type(cache.layers[3]) is type(make_cache(kind, model).layers[3])


ASSISTED = [
    ("lookup", {"prompt_lookup_num_tokens": 4}),
    ("assistant", {}),
    ("early exit", {"assistant_early_exit": 3}),
    *((f"chunks of {chunk}", {"prefill_chunk_size": chunk}) for chunk in (1, 13, 39, 40)),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "options"), ASSISTED)
def test_assisted_decoding_and_chunked_prefill_give_the_greedy_tokens(name, options):
    """The assistant is sparse, too. A last chunk of one token is told from decoding by its position."""
    model, assistant, (ids, _) = tiny_model(), tiny_model(num_hidden_layers=3), prompts((40,))
    assistant.generation_config.update(assistant_confidence_threshold=0.0, num_assistant_tokens=4)
    options = options or {"assistant_model": assistant}
    own = Attachment(model, Calibrated(), TENTH, sparse_rows=40)
    with own as attachment, attach(assistant, SignHasher(seed=3), TENTH):
        greedy, counts = run(model, ids, new_tokens=20), attachment.counts()
        attachment.reset_density()
        assert torch.equal(run(model, ids, new_tokens=20, **options), greedy)
        assert ("chunks" in name) == (attachment.counts() == counts), "several tokens were checked at once"


def test_a_mask_of_packed_texts_is_refused_for_the_remainder():
    model, (ids, _) = tiny_model(), prompts((20,))
    mask = torch.tril(torch.ones(20, 20, dtype=torch.bool))[None, None].clone()
    mask[..., 10:19, :5] = False
    refused = pytest.raises(ValueError, match="needs a causal mask")
    with Attachment(model, Calibrated(), Budget(0.2), sparse_rows=0), refused:
        model(ids, attention_mask=mask, use_cache=False)


def test_token_by_token_with_a_static_cache_and_no_mask():
    """Hugging Face passes no mask here, though most of the room is empty.

    The caches round the remainder's covariance after different tokens: 3e-4 of a logit.
    """
    model, (ids, _) = tiny_model(), prompts((20,))
    for hasher, near in ((SignHasher(), 1e-5), (Calibrated(), 1e-3)):
        logits = []
        with attach(model, hasher, Budget(0.3, min_tokens=2), dense_layers=0):
            for kind in ("static", "dynamic"):
                cache = make_cache(kind, model)
                logits.append(torch.cat([model(ids[:, [t]], past_key_values=cache).logits for t in range(20)], 1))
        torch.testing.assert_close(*logits, atol=near, rtol=near)


@pytest.mark.sample(1)
@BOTH
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_caches_filled_before_attaching_copied_and_used_after_detaching(kind, hasher, monkeypatch):
    model, (ids, _) = tiny_model(), prompts((40,), seed=2)

    def prefilled():
        cache = make_cache(kind, model)
        model(ids[:, :30], attention_mask=torch.ones_like(ids[:, :30]), past_key_values=cache)
        return cache

    early, dense = prefilled(), run(model, ids, past_key_values=prefilled())
    kept = copy.deepcopy(early)
    auditor = Auditor(monkeypatch)
    with attach(model, hasher, TENTH):
        late = prefilled()
        expected = run(model, ids, past_key_values=copy.deepcopy(late))
        for cache in (copy.deepcopy(early), copy.deepcopy(late), late):
            assert torch.equal(run(model, ids, past_key_values=cache), expected)
        assert not torch.equal(expected, dense)
        model(ids[:, 30:35], attention_mask=torch.ones_like(ids[:, :35]), past_key_values=early)
    assert {type(layer) for layer in early.layers} == {type(layer) for layer in kept.layers}
    with attach(model, SignHasher(seed=1), TENTH):
        other = run(model, ids, past_key_values=copy.deepcopy(kept))
        assert torch.equal(run(model, ids, past_key_values=copy.deepcopy(early)), other)
    assert auditor.steps == 6 * 15 * 4
    assert torch.equal(run(model, ids, past_key_values=early), dense)


def test_two_models_in_one_process():
    models = [tiny_model("llama"), tiny_model("qwen3", num_attention_heads=8)]
    (ids, mask), apart = prompts(), []
    for model in models:
        with attach(model, SignHasher(), TENTH):
            apart.append(run(model, ids, mask))
    with attach(models[0], SignHasher(), TENTH) as first, attach(models[1], SignHasher(), TENTH) as second:
        for model, expected in zip(models, apart, strict=True):
            assert torch.equal(run(model, ids, mask), expected)
        assert 2 * first.counts()[2][1] == second.counts()[2][1] > 0  # counted by query head


def test_one_model_from_two_threads():
    model, found = tiny_model(), {}
    batches = [prompts((40,), seed)[0] for seed in range(3)]

    def work(index):
        with torch.no_grad():
            found[index] = [generate(model, batches[index], new_tokens=8) for _ in range(2)]

    with attach(model, HashSelector(Calibrated()), TENTH):
        expected = [generate(model, ids, new_tokens=8) for ids in batches]
        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index, tokens in enumerate(expected):
        assert all(torch.equal(tokens, again) for again in found[index])
