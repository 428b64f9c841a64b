"""Every way of decoding and every kind of cache gives the tokens of plain sparse decoding with a dynamic cache."""

import copy

import pytest
import torch
from sparse_decode import Budget, OracleSelector, RecentSelector, attach, sums
from sparse_decode.attach import attach_rows
from sparse_decode.budget import LayerBudget
from sparse_decode.caches.offload import HostLayer
from sparse_decode_doubles import (
    Auditor,
    Calibrated,
    PaperLikeHasher,
    RoundedLayer,
    SignHasher,
    generate,
    prompts,
    slow_but,
    tiny_model,
)
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, LogitsProcessor, LogitsProcessorList, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

BUDGET = Budget(0.1, min_tokens=2, sink=1, recent=2)
WAYS = {"greedy": {}, "beam": {"num_beams": 3}, "sampling": {"do_sample": True}}


def run(model, ids, mask=None, **options):
    torch.manual_seed(5)
    return generate(model, ids, mask, **options)


def make_cache(kind, model):
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=80)
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return Cache(layers=[RoundedLayer() for _ in range(model.config.num_hidden_layers)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "family"), [("static", "llama"), ("static", "gpt_oss"), ("static", "gemma3")])
def test_other_caches_give_the_tokens_of_a_dynamic_one(kind, family, way, monkeypatch):
    model, (ids, mask) = tiny_model(family), prompts()
    with attach(model, SignHasher(), BUDGET) as attachment:
        expected, counts = run(model, ids, mask, **WAYS[way]), attachment.counts()
        attachment.reset_density()
        auditor = Auditor(monkeypatch)
        cache = make_cache(kind, model)
        assert torch.equal(run(model, ids, mask, past_key_values=cache, **WAYS[way]), expected)
        assert attachment.counts() == counts
        assert auditor.steps == 15 * len(attachment.layers)
        assert auditor.padded == auditor.steps
    assert type(cache.layers[3]) is type(make_cache(kind, model).layers[3])


@pytest.mark.parametrize("selector", [PaperLikeHasher(), OracleSelector(True), RecentSelector()])
def test_a_static_cache_works_with_every_selector(selector, monkeypatch):
    model, (ids, mask) = tiny_model(), prompts()
    with attach(model, selector, BUDGET):
        expected = run(model, ids, mask)
        Auditor(monkeypatch)
        assert torch.equal(run(model, ids, mask, cache_implementation="static"), expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
def test_static_caches_keep_the_remainder(way):
    model, (ids, mask) = tiny_model(), prompts()
    with attach(model, Calibrated(), BUDGET) as attachment:
        assert attachment.remainder
        expected = run(model, ids, mask, **WAYS[way])
        assert torch.equal(run(model, ids, mask, past_key_values=make_cache("static", model), **WAYS[way]), expected)
    with attach(model, Calibrated(), BUDGET, remainder=False):
        assert not torch.equal(run(model, ids, mask, **WAYS[way]), expected)


def test_token_by_token_with_a_static_cache_and_no_mask():
    """Hugging Face passes no mask here, though most of the room is empty."""
    model, (ids, _) = tiny_model(), prompts((20,))
    with attach(model, SignHasher(), Budget(0.3, min_tokens=2), dense_layers=0):
        logits = {}
        for kind in ("static", "dynamic"):
            cache = make_cache(kind, model)
            logits[kind] = torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(20)], 1)
    torch.testing.assert_close(logits["static"], logits["dynamic"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_caches_filled_before_attaching_and_used_after_detaching(kind):
    model, (ids, _) = tiny_model(), prompts((40,), seed=2)
    mask = torch.ones_like(ids)

    def prefilled():
        cache = make_cache(kind, model)
        model(ids[:, :30], attention_mask=mask[:, :30], past_key_values=cache)
        return cache

    early = prefilled()
    dense = run(model, ids, past_key_values=prefilled())
    with attach(model, SignHasher(), BUDGET):
        late = run(model, ids, past_key_values=prefilled())
        assert torch.equal(run(model, ids, past_key_values=copy.deepcopy(early)), late)
        assert not torch.equal(late, dense)
        model(ids[:, 30:31], attention_mask=mask[:, :31], past_key_values=early)
    with attach(model, SignHasher(), Budget(1.0)):
        assert torch.equal(run(model, ids, past_key_values=prefilled()), dense)
    assert run(model, ids, past_key_values=early).shape == dense.shape


def test_a_quantised_cache_is_refused():
    model, (ids, mask) = tiny_model(), prompts()
    with attach(model, SignHasher(), Budget(1.0)), pytest.raises(ValueError, match=r"RoundedLayer.*DynamicCache"):
        run(model, ids, mask, past_key_values=make_cache("quantised", model))


def compiling(**options):
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    return {"compile_config": config, **options}


@pytest.fixture
def graphs():
    """Counts of the compiler, from zero."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda: (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    torch._dynamo.reset()


@pytest.mark.parametrize("family", slow_but(("llama",), ["llama", "gpt_oss"]))
def test_a_compiled_step_is_one_graph_with_the_same_tokens_and_counts(family, graphs):
    kinds = {"gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]}}.get(family, {})
    model, (ids, mask) = tiny_model(family, num_hidden_layers=2, **kinds), prompts()
    budget = LayerBudget(0.1, min_tokens=2, sink=1, dense_below=30)
    # The sliding layer of gpt-oss has a second graph, from the moment its window is full; so it has without us.
    expected_graphs = {"llama": 1, "gpt_oss": 2}[family]
    with attach(model, SignHasher(), budget, dense_layers=0) as attachment:
        expected, counts = run(model, ids, mask), attachment.counts()
        for _ in range(2):
            attachment.reset_density()
            compiled = run(model, ids, mask, cache_implementation="static", **compiling())
            assert torch.equal(compiled, expected)
            assert attachment.counts() == counts
            assert graphs() == (expected_graphs, 0)
    dense = run(model, ids, mask)
    assert torch.equal(run(model, ids, mask, cache_implementation="static", **compiling()), dense)


def test_a_compiled_step_keeps_the_means(graphs, monkeypatch):
    model, (ids, mask) = tiny_model(num_hidden_layers=1), prompts()
    with attach(model, Calibrated(), BUDGET, dense_layers=0):
        expected = run(model, ids, mask)
        cache = StaticCache(config=model.config, max_cache_len=80)
        summed = []
        original = sums._shown

        def listening(x, seen, first, last, device):
            summed.append(last - first)
            return original(x, seen, first, last, device)

        monkeypatch.setattr(sums, "_shown", listening)
        for _ in range(2):  # the second time through the graph of the first
            assert torch.equal(run(model, ids, mask, past_key_values=cache, **compiling()), expected)
            assert sum(summed) == 2 * (39 + sums.FOLD)  # keys and values: the prefill, and those that steps have added
            summed.clear()
            cache.reset()
        assert graphs() == (1, 0)


def test_a_compiled_call_of_short_rows_is_dense(graphs):
    model, (ids, mask) = tiny_model(num_hidden_layers=1), prompts()
    dense = run(model, ids, mask, new_tokens=4)
    with attach(model, SignHasher(), LayerBudget(0.1, dense_below=1000), dense_layers=0) as attachment:
        assert torch.equal(run(model, ids, mask, new_tokens=4, cache_implementation="static", **compiling()), dense)
        assert attachment.density() == {0: 1.0}
        assert graphs() == (1, 0)


@pytest.mark.slow
def test_chunked_prefill_compiled_from_the_first_call(graphs):
    model, (ids, mask) = tiny_model(num_hidden_layers=1), prompts()
    options = {"prefill_chunk_size": 16, "new_tokens": 6, **compiling()}
    with attach(model, SignHasher(), BUDGET, dense_layers=0) as attachment:
        expected = run(model, ids, mask, new_tokens=6)
        cache = StaticCache(config=model.config, max_cache_len=64)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call prepare\(cache\)"):
            run(model, ids, mask, past_key_values=cache, **options)
        cache.early_initialization(3, 2, 16, torch.float32, torch.device("cpu"))
        assert torch.equal(run(model, ids, mask, past_key_values=attachment.prepare(cache), **options), expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("helper", ["assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens"])
def test_assisted_decoding_gives_the_greedy_tokens(helper, monkeypatch):
    model, (ids, _) = tiny_model(), prompts((40,))
    options = {helper: {"assistant_model": tiny_model(num_hidden_layers=3), "assistant_early_exit": 3}.get(helper, 4)}
    with attach_rows(model, SignHasher(), BUDGET, sparse_rows=40):
        greedy = run(model, ids, new_tokens=20)
        auditor = Auditor(monkeypatch)
        assert torch.equal(run(model, ids, new_tokens=20, **options), greedy)
        assert any(visible.shape[1] > 1 for visible, _ in auditor.sizes), "several tokens were checked at once"


def test_an_assistant_may_be_sparse_too():
    model, assistant, (ids, _) = tiny_model(), tiny_model(num_hidden_layers=3), prompts((40,))
    with attach_rows(model, SignHasher(), BUDGET, sparse_rows=40):
        greedy = run(model, ids, new_tokens=20)
        assistant.generation_config.update(assistant_confidence_threshold=0.0, num_assistant_tokens=4)
        with attach(assistant, SignHasher(seed=3), BUDGET) as attachment:
            assert torch.equal(run(model, ids, new_tokens=20, assistant_model=assistant), greedy)
            assert attachment.density()


@pytest.mark.parametrize("chunk", [1, 7, 13, 16, 39, 40, 100])
def test_prefill_in_chunks_is_the_whole_prefill(chunk):
    model, (ids, mask) = tiny_model(), prompts((40, 27))
    with attach_rows(model, SignHasher(), BUDGET, sparse_rows=40):
        whole = run(model, ids, mask)
        assert torch.equal(run(model, ids, mask, prefill_chunk_size=chunk), whole)


def test_a_conversation_in_one_cache():
    model, (ids, _) = tiny_model(), prompts((40,))
    with attach(model, SignHasher(), BUDGET):
        cache = DynamicCache()
        first = run(model, ids, new_tokens=8, past_key_values=cache)
        longer = torch.cat([first, ids[:, :5]], 1)
        again = run(model, longer, new_tokens=8, past_key_values=cache)
        fresh = DynamicCache()
        model(longer[:, :40], past_key_values=fresh)
        for t in range(40, 47):
            model(longer[:, t : t + 1], past_key_values=fresh)
        assert torch.equal(run(model, longer, new_tokens=8, past_key_values=fresh), again)


class DetachAt(LogitsProcessor):
    """Detaches once so many tokens have been made."""

    def __init__(self, attachment, length):
        self.attachment, self.length = attachment, length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == self.length:
            self.attachment.detach()
        return scores


@pytest.mark.parametrize(("kind", "kv"), [("dynamic", "device"), ("dynamic", "host"), ("static", "device")])
def test_detaching_in_the_middle_of_a_generation(kind, kv):
    model, (ids, _) = tiny_model(), prompts((40,), seed=2)
    with attach(model, SignHasher(), BUDGET):
        sparse = run(model, ids, past_key_values=make_cache(kind, model))
        cache = make_cache(kind, model)
        run(model, ids, new_tokens=7, past_key_values=cache)
    expected = run(model, sparse[:, :47], new_tokens=9, past_key_values=cache)
    attachment = attach(model, SignHasher(), BUDGET, kv=kv)
    stop = LogitsProcessorList([DetachAt(attachment, 46)])
    found = run(model, ids, past_key_values=make_cache(kind, model), logits_processor=stop)
    assert torch.equal(found, expected)
    assert not torch.equal(found, sparse)


@pytest.mark.parametrize("way", WAYS)
def test_keys_and_values_on_the_host_give_the_same_tokens(way):
    model, (ids, mask) = tiny_model(), prompts()
    with attach(model, SignHasher(), BUDGET) as attachment:
        expected, counts = run(model, ids, mask, **WAYS[way]), attachment.counts()
    with attach(model, SignHasher(), BUDGET, kv="host") as attachment:
        assert torch.equal(run(model, ids, mask, **WAYS[way]), expected)
        assert attachment.counts() == counts


def test_only_selected_rows_cross_over():
    model, (ids, _) = tiny_model(), prompts((40,))
    with attach(model, SignHasher(), Budget(0.1, sink=0, recent=0), kv="host") as attachment:
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        layer = cache.layers[3]
        assert type(layer) is HostLayer
        row = 2 * 16 * 4  # a key and a value of 16 float32
        assert layer.crossed == 2 * 40 * row  # the dense prefill: every token of two KV heads
        for step in range(1, 6):
            before = layer.crossed
            model(ids[:, :1], past_key_values=cache)
            assert layer.crossed - before == 2 * ((40 + step) // 10) * row
        selected, _ = attachment.counts()[3]
        assert layer.crossed == 2 * 40 * row + selected // 2 * row  # counted per query head, two of which share a row


def test_the_host_holds_everything_that_the_device_would():
    model, (ids, _) = tiny_model(), prompts((40,))
    caches = {}
    for kv in ("device", "host"):
        with attach(model, SignHasher(), Budget(0.1), kv=kv) as attachment:
            caches[kv] = DynamicCache(config=model.config)
            model(ids, past_key_values=caches[kv])
            layer = caches[kv].layers[2]
            assert layer.memory() == (2 * 2 * 40 * 16 * 4, 2 * 40 * 16)
            assert attachment.memory(caches[kv]) == (4 * 2 * 2 * 40 * 16 * 4, 4 * 2 * 40 * 16)
    for a, b in zip(caches["device"].layers, caches["host"].layers, strict=True):
        assert type(a) is type(b) is DynamicLayer
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


def test_static_caches_on_the_host_are_refused():
    model, (ids, _) = tiny_model(), prompts((9,))
    with attach(model, SignHasher(), kv="host"), pytest.raises(ValueError, match='kv="host" needs a DynamicCache'):
        run(model, ids, past_key_values=make_cache("static", model))


def test_selectors_without_codes_are_refused_for_keys_on_the_host():
    with pytest.raises(ValueError, match='got OracleSelector; use kv="device"'):
        attach(tiny_model(), OracleSelector(), kv="host")
    with pytest.raises(ValueError, match='kv must be "device" or "host"'):
        attach(tiny_model(), SignHasher(), kv="disk")


@pytest.mark.parametrize("left", [11, 19])
def test_a_cache_cropped_by_hand_is_gone_on_with(left):
    model, (ids, _) = tiny_model(), prompts((20,))

    def logits():
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :left], layer.values[:, :, :left]
        return model(ids[:, :1], past_key_values=cache).logits

    dense = logits()
    with attach(model, SignHasher(), Budget(1.0)):
        torch.testing.assert_close(logits(), dense, atol=1e-5, rtol=1e-5)
