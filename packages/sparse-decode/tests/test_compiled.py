"""Compiled steps of static caches: one graph, and the tokens and counts of steps that are not compiled."""

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import attach, sums
from sparse_decode.budget import LayerBudget
from sparse_decode.select import RecentSelector
from sparse_decode_doubles import Calibrated, SignHasher, generate, prompts, slow_but, tiny_model
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache


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


class Reaching(SignHasher):
    reach = 1000  # contexts are compared with it


CASES = (
    ("llama", Calibrated(), 0),
    ("llama", Reaching(), 1000),
    ("llama", Reaching(), 30),
    ("llama", Hasher(HasherConfig("transform", ModelShape.of(tiny_model(num_hidden_layers=2).config), bits=64), 0), 0),
    ("gpt_oss", SignHasher(), 30),
)


@pytest.mark.parametrize(("family", "hasher", "below"), slow_but(CASES[:1], CASES))
def test_a_compiled_step_is_one_graph_with_the_same_tokens_and_counts(family, hasher, below, graphs, monkeypatch):
    """Also through the graph of an earlier generation, and dense ones below 1000."""
    kinds = {"gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]}}.get(family, {})
    model, (ids, mask) = tiny_model(family, num_hidden_layers=2, **kinds), prompts()
    # The sliding layer of gpt-oss has a second graph, from the moment its window is full; so it has without us.
    expected_graphs = {"llama": 1, "gpt_oss": 2}[family]
    dense, summed, shown = generate(model, ids, mask), [], sums._shown
    monkeypatch.setattr(sums, "_shown", lambda x, *how: (summed.append(how[2] - how[1]), shown(x, *how))[1])
    budget = LayerBudget(0.1, min_tokens=2, sink=1, dense_below=below)
    with attach(model, hasher, budget, dense_layers=0) as attachment:
        expected, counts = generate(model, ids, mask), attachment.counts()
        assert torch.equal(expected, dense) == (below == 1000)
        cache = StaticCache(config=model.config, max_cache_len=80)
        for _ in range(2):
            attachment.reset_density()
            summed.clear()
            assert torch.equal(generate(model, ids, mask, past_key_values=cache, **compiling()), expected)
            assert attachment.counts() == counts
            # Keys and values of two layers: the prompt but its last token, and those that steps have added.
            assert sum(summed) == 2 * 2 * (39 + sums.FOLD) * attachment.remainder
            assert graphs() == (expected_graphs, 0)
            cache.reset()
    if family == "gpt_oss":
        assert torch.equal(generate(model, ids, mask, cache_implementation="static", **compiling()), dense)


@pytest.mark.slow
def test_chunked_prefill_compiled_from_the_first_call(graphs):
    model, (ids, mask) = tiny_model(num_hidden_layers=1), prompts()
    options = {"prefill_chunk_size": 16, "new_tokens": 6, **compiling()}
    with attach(model, SignHasher(), LayerBudget(0.1, sink=1, recent=2), dense_layers=0) as attachment:
        expected = generate(model, ids, mask, new_tokens=6)
        cache = StaticCache(config=model.config, max_cache_len=64)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call prepare\(cache\)"):
            generate(model, ids, mask, past_key_values=cache, **options)
        cache.early_initialization(3, 2, 16, torch.float32, torch.device("cpu"))
        assert torch.equal(generate(model, ids, mask, past_key_values=attachment.prepare(cache), **options), expected)


@pytest.mark.slow
def test_inductor_compiles_a_step_of_the_opaque_operator(graphs):
    """Other backends are easier to please: they compile an operator that changes an empty list."""
    model, (ids, _), logits = tiny_model(num_hidden_layers=1), prompts((40,)), []
    with attach(model, RecentSelector(), LayerBudget(0.2), dense_layers=0):
        for step in (model, torch.compile(model, fullgraph=True)):
            cache = StaticCache(config=model.config, max_cache_len=63)
            model(ids[:, :39], past_key_values=cache)
            logits.append(step(ids[:, 39:], past_key_values=cache).logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
