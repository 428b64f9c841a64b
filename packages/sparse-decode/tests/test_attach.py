"""Attaching: density by hand, restoring, every refusal, and the warning beyond a hasher's reach."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
from sparse_decode import Attachment, Budget, HashSelector, OracleSelector, RecentSelector, attach
from sparse_decode_doubles import RoundedLayer, SignHasher, generate, hasher_for, prompts, tiny_model
from transformers import DynamicCache, StaticCache


def hooks(model):
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def test_density_by_hand():
    model, lengths = tiny_model(), (40, 27)
    ids, mask = prompts(lengths)
    with attach(model, RecentSelector(), Budget(0.1, sink=2, recent=3), dense_layers=1) as attachment:
        assert torch.equal(model(ids, attention_mask=mask).logits, tiny_model()(ids, attention_mask=mask).logits)
        assert attachment.density() == {}, "the prefill is dense, to the bit"
        generate(model, ids, mask, new_tokens=8)
        visible = [length + step for length in lengths for step in range(1, 8)]
        selected = [max(n // 10, 2 + 3) for n in visible]  # the first and the last tokens count within the budget
        expected = (4 * sum(selected), 4 * sum(visible))  # four query heads
        assert attachment.counts() == {1: expected, 2: expected, 3: expected}
        assert attachment.density() == {layer: expected[0] / expected[1] for layer in (1, 2, 3)}
        attachment.reset_density()
        assert attachment.density() == {}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_detaching_restores_the_model_after_an_exception_too(implementation):
    model, (ids, mask) = tiny_model(implementation=implementation), prompts()
    before, modules = model(ids, attention_mask=mask).logits, hooks(model)
    attachment = Attachment(model, SignHasher(), Budget(0.1), sparse_rows=0)
    assert not torch.equal(model(ids, attention_mask=mask).logits, before)
    attachment.detach()
    attachment.detach()
    with pytest.raises(KeyError), attach(model, SignHasher()):
        raise KeyError
    assert torch.equal(model(ids, attention_mask=mask).logits, before)
    assert model.config._attn_implementation == model.model.config._attn_implementation == implementation
    assert hooks(model) == modules


def test_a_forward_pass_with_gradients_on_works():
    model, (ids, _) = tiny_model(), prompts((40,))
    with torch.enable_grad(), Attachment(model, SignHasher(), sparse_rows=0):
        loss = model(ids, labels=ids).loss
        with pytest.raises(RuntimeError, match="no backward"):
            loss.backward()


# ---- Refusals --------------------------------------------------------------------------------------------------------


def t5():
    config = transformers.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return transformers.AutoModelForSeq2SeqLM.from_config(config)


def attending_by(name):
    model = tiny_model()
    model.config._attn_implementation_internal = name
    return model


def choosing():
    class Choosing(transformers.models.llama.modeling_llama.LlamaAttention):
        def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
            attention_mask = None  # a mask of its own, as MiniMax-M3 and DeepSeek-V4 make it
            return hidden_states, attention_mask

    model = tiny_model()
    model.model.layers[1].self_attn.__class__ = Choosing
    return model


S = SignHasher()
OTHER = hasher_for(tiny_model(num_key_value_heads=4), "planes")
REFUSED = [  # words, model, what attach is given, options
    ("expected KV heads 8, got 2", tiny_model, (SignHasher(kv_heads=8),), {}),
    ("another model .*expected KV heads", tiny_model, (OTHER,), {}),
    ("another model .*expected KV heads", tiny_model, (HashSelector(OTHER, per_query_head=True),), {}),
    (r"must be a Budget, got 0.+; write Budget\(fraction=0.02\)", tiny_model, (S, 0.02), {}),
    ("or a Selector, got int", tiny_model, (3,), {}),
    ("got the path runs/mine; read it first with hashtrain.Hasher", tiny_model, ("runs/mine",), {}),
    ("none of which sees the whole context", lambda: tiny_model("mistral", sliding_window=16), (S,), {}),
    ("expected causal attention", lambda: tiny_model("gemma3", use_bidirectional_attention=True), (S,), {}),
    ("decoder-only", t5, (S,), {}),
    ("takes its mask as it is, got Choosing", choosing, (), {}),
    ('"eager" or "flash_attention_2", got "flash_attention_3"', lambda: attending_by("flash_attention_3"), (S,), {}),
    ('must be "sdpa", "eager" or .*, got "flex_attention"', lambda: attending_by("flex_attention"), (S,), {}),
    (r"layers \[0, 1, 2, 3\] sparse, got \[0, 1, 2, 3\]", tiny_model, (S,), {"dense_layers": 4}),
    ("names layer 4, expected layers of the model, 0 to 3", tiny_model, (S,), {"dense_layers": {1, 4}}),
    ("^dense_layers must be", tiny_model, (S,), {"dense_layers": -1}),
    ("^dense_layers must be", tiny_model, (S,), {"dense_layers": 1.5}),
    ('got OracleSelector; use kv="device"', tiny_model, (OracleSelector(),), {"kv": "host"}),
    ('kv must be "device" or "host"', tiny_model, (S,), {"kv": "disk"}),
    ("^sparse_rows must be", tiny_model, (S,), {"sparse_rows": -1}),
    ("^sparse_rows must be", tiny_model, (S,), {"sparse_rows": "prefill"}),
]


@pytest.mark.parametrize(("words", "make", "given", "options"), REFUSED)
def test_refused_when_attaching_and_the_model_is_as_it_was(words, make, given, options):
    model = make()
    name, before = model.get_decoder().config._attn_implementation, hooks(model)
    with pytest.raises(ValueError, match=words):
        attach(model, *given, **options)
    assert (model.get_decoder().config._attn_implementation, hooks(model)) == (name, before)


def test_heads_divided_among_processes_are_refused(monkeypatch):
    class Part(torch.nn.Parameter):
        """A tensor of which each process has a part."""

    monkeypatch.setattr("sparse_decode.model.DTensor", Part)
    model = tiny_model()
    module = model.model.layers[2].self_attn.k_proj
    module.weight = Part(module.weight.detach())
    with pytest.raises(ValueError, match="tensor parallelism; load the model in one process, or serve it with vLLM"):
        attach(model, S)


def cache_of(model, offloading=False):
    """One that offloads, or whose last layer cannot carry codes."""
    cache = DynamicCache(config=model.config)
    cache.layers[3:], cache.offloading = cache.layers[3:] if offloading else [RoundedLayer()], offloading
    return cache


BIASED = torch.linspace(-3, 0, 40).expand(1, 1, 40, 40)
CALLS = [
    (r"RoundedLayer.* use DynamicCache\(", {}, lambda model: {"past_key_values": cache_of(model)}),
    (r"offloads.* use DynamicCache\(", {}, lambda model: {"past_key_values": cache_of(model, True)}),
    ("does not support position_bias", {}, lambda model: {"position_bias": torch.zeros(1)}),
    ("is causal, got", {}, lambda model: {"is_causal": False}),
    (r"continuous batching; .*vLLM \(sparse-serve\)", {}, lambda model: {"read_index": []}),
    (r"call model.eval\(\)", {"attention_dropout": 0.5}, lambda model: {}),
    ("got one with biases", {"implementation": "eager"}, lambda model: {"attention_mask": BIASED}),
]


@pytest.mark.parametrize(
    ("rows", "words", "changes", "asked"),
    [(rows, *call) for rows in (None, 0) for call in CALLS if rows == 0 or call[0] != "is causal, got"],
)
def test_calls_that_cannot_be_served_are_refused(rows, words, changes, asked):
    """Prompts are the model's own, which may not be causal."""
    model, (ids, _) = tiny_model(**changes).train("attention_dropout" in changes), prompts((40,))
    with Attachment(model, S, dense_layers=0, sparse_rows=rows), pytest.raises(ValueError, match=words):
        model(ids, **asked(model))


def test_something_else_than_a_cache_is_refused():
    model = tiny_model()
    with attach(model, S), pytest.raises(ValueError, match="must be a transformers Cache, got SimpleNamespace"):
        model.model.layers[2].self_attn(None, past_key_values=SimpleNamespace())


# ---- A context beyond the reach of its hasher ------------------------------------------------------------------------

REACH, TOLD = 43, "longer than the 43 that its hasher was made for"


class Reaching(SignHasher):
    reach = REACH


def test_a_step_beyond_the_reach_warns_once():
    """The prompt has 40 tokens: the fourth generated one is the first beyond."""
    model, (ids, mask) = tiny_model(), prompts((40,))
    assert not hasattr(SignHasher(), "reach")
    with warnings.catch_warnings(action="error"), attach(model, HashSelector(SignHasher()), Budget(0.1)):
        generate(model, ids, mask, new_tokens=6)
    with attach(model, Reaching(), Budget(0.1)):
        with warnings.catch_warnings(action="error"):
            generate(model, ids, mask, new_tokens=4)  # the last one is never put in
        with pytest.warns(UserWarning, match=f"a context of 44 tokens is {TOLD}") as found:
            generate(model, ids, mask, new_tokens=9)
    assert len(found) == 1
    assert "`hashtrain --reach 44`" in str(found[0].message)
    assert hooks(model) == 0


def test_a_static_cache_counts_as_long_as_it_has_room():
    model = tiny_model()
    for room, told in ((REACH, 0), (64, 1)):
        cache = StaticCache(config=model.config, max_cache_len=room)
        with warnings.catch_warnings(record=True) as found, attach(model, Reaching(), Budget(0.1)):
            warnings.simplefilter("always")
            for ids in (torch.arange(1, 41), torch.tensor([5]), torch.tensor([6])):
                model(ids[None], past_key_values=cache)
        assert len(found) == told
