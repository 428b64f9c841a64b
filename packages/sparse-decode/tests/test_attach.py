"""Attaching: density by hand, restoring, and every refusal."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from sparse_decode import Budget, OracleSelector, RecentSelector, attach
from sparse_decode.attach import attach_rows
from sparse_decode.budget import LayerBudget
from sparse_decode.removed import OF_ATTACH
from sparse_decode_doubles import SignHasher, generate, prompts, tiny_model
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def hooks(model):
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def test_density_by_hand():
    model, lengths = tiny_model(), (40, 27)
    ids, mask = prompts(lengths)
    with attach(model, RecentSelector(), Budget(0.1, sink=2, recent=3), dense_layers=1) as attachment:
        generate(model, ids, mask, new_tokens=8)
        visible = [length + step for length in lengths for step in range(1, 8)]
        selected = [max(n // 10, 2 + 3) for n in visible]  # the first and the last tokens count within the budget
        expected = (4 * sum(selected), 4 * sum(visible))  # four query heads
        assert attachment.counts() == {1: expected, 2: expected, 3: expected}
        assert attachment.density() == {layer: expected[0] / expected[1] for layer in (1, 2, 3)}
        attachment.reset_density()
        assert attachment.density() == {}


@pytest.mark.parametrize(("of", "expected"), [("visible", sum(max(n // 10, 1) for n in range(1, 41))), ("length", 154)])
def test_density_of_the_evaluation_rule_by_hand(of, expected):
    model, (ids, _) = tiny_model(), prompts((40,))
    with attach_rows(
        model, OracleSelector(per_query_head=True), LayerBudget(0.1, sink=0, recent=0, of=of), sparse_rows=0
    ) as attachment:
        model(ids)
        assert attachment.counts()[3] == (4 * expected, 4 * 820)  # four query heads; 1 + 2 + 3 + 37 * 4 = 154


def test_detaching_restores_the_model():
    model, (ids, mask) = tiny_model(), prompts()
    before, modules = model(ids, attention_mask=mask).logits, hooks(model)
    attachment = attach_rows(model, SignHasher(), Budget(0.1), sparse_rows=0)
    assert not torch.equal(model(ids, attention_mask=mask).logits, before)
    attachment.detach()
    attachment.detach()
    assert torch.equal(model(ids, attention_mask=mask).logits, before)
    assert model.config._attn_implementation == model.model.config._attn_implementation == "sdpa"
    assert hooks(model) == modules


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_exception_inside_detaches_too(implementation):
    model = tiny_model(implementation=implementation)
    with pytest.raises(KeyError), attach(model, SignHasher()):
        raise KeyError
    assert model.config._attn_implementation == implementation
    assert hooks(model) == 0


def test_the_prefill_is_bitwise_dense():
    model, (ids, mask) = tiny_model(), prompts()
    before = model(ids, attention_mask=mask).logits
    with attach(model, SignHasher(), Budget(0.1)) as attachment:
        assert torch.equal(model(ids, attention_mask=mask).logits, before)
        assert attachment.layers == (0, 1, 2, 3)
        assert attachment.density() == {}


def test_a_forward_pass_with_gradients_on_works():
    model, (ids, _) = tiny_model(), prompts((40,))
    with torch.enable_grad(), attach_rows(model, SignHasher(), sparse_rows=0):
        loss = model(ids, labels=ids).loss
        with pytest.raises(RuntimeError, match="no backward"):
            loss.backward()


def deepseek():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": None, "kv_lora_rank": 16}
    parts = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 2}
    more = {"vocab_size": 97, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
    config = transformers.DeepseekV3Config(**sizes, **heads, **parts, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


def t5():
    config = transformers.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return transformers.AutoModelForSeq2SeqLM.from_config(config)


def refused(message, model, *arguments, **options):
    """Attaching raises one sentence and leaves the model as it was."""
    name, before = model.get_decoder().config._attn_implementation, hooks(model)
    with pytest.raises(ValueError, match=message):
        attach(model, *arguments, **options)
    assert (model.get_decoder().config._attn_implementation, hooks(model)) == (name, before)


def test_what_is_no_hasher_or_no_budget_is_refused():
    refused("expected KV heads 8, got 2", tiny_model(), SignHasher(kv_heads=8))
    refused(r"must be a Budget, got 0.+; write Budget\(fraction=0.02\)", tiny_model(), SignHasher(), 0.02)
    refused("or a Selector, got int", tiny_model(), 3)
    refused("got the path runs/mine; read it first with hashtrain.Hasher", tiny_model(), "runs/mine")


def test_models_without_full_causal_attention_are_refused():
    refused("none of which sees the whole context", tiny_model("mistral", sliding_window=16), SignHasher())
    refused("expected causal attention", tiny_model("gemma3", use_bidirectional_attention=True), SignHasher())
    refused("multi-head latent attention", deepseek(), SignHasher())
    refused("decoder-only", t5(), SignHasher())


@pytest.mark.parametrize("name", ["flash_attention_3", "flex_attention"])
def test_other_attention_implementations_are_refused(name):
    model = tiny_model()
    model.config._attn_implementation_internal = name
    refused(f'must be "sdpa", "eager" or "flash_attention_2", got "{name}"', model, SignHasher())


def test_dense_layers_that_leave_none_or_that_the_model_does_not_have_are_refused():
    refused(r"layers \[0, 1, 2, 3\] sparse, got \[0, 1, 2, 3\]", tiny_model(), SignHasher(), dense_layers=4)
    refused("names layer 4, expected layers of the model, 0 to 3", tiny_model(), SignHasher(), dense_layers={1, 4})


@pytest.mark.parametrize("name", [*OF_ATTACH])
def test_arguments_of_earlier_versions_are_refused_by_name(name):
    refused(f"attach no longer takes {name}: .+", tiny_model(), SignHasher(), **{name: 1})


def test_attaching_twice_is_refused():
    model = tiny_model()
    with attach(model, SignHasher()):
        refused("already attached", model, SignHasher())
    attach(model, SignHasher()).detach()


def test_sliding_layers_stay_dense():
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    model = tiny_model("qwen2", layer_types=types, use_sliding_window=True, sliding_window=8)
    ids, mask = prompts()
    dense = generate(model, ids, mask)
    with attach(model, SignHasher(), Budget(1.0), dense_layers=0) as attachment:
        assert attachment.layers == (0, 3)
        assert torch.equal(generate(model, ids, mask), dense)


@pytest.mark.parametrize(
    ("option", "value"), [("dense_layers", -1), ("sparse_rows", -1), ("sparse_rows", "prefill"), ("dense_layers", 1.5)]
)
def test_wrong_options_are_named(option, value):
    model = tiny_model()
    with pytest.raises(ValueError, match=f"^{option} must be"):
        attach_rows(model, SignHasher(), **{"sparse_rows": None, option: value})
    assert hooks(model) == 0


class Compressed(DynamicLayer):
    """A cache layer that nobody told us about."""


def odd_cache(kind, model):
    cache = DynamicCache(config=model.config)
    if kind == "Compressed":
        cache.layers[3] = Compressed()
    else:
        cache.offloading = True
    return cache


@pytest.mark.parametrize("kind", ["Compressed", "offloads"])
def test_unknown_caches_are_refused_at_first_use(kind):
    model, (ids, _) = tiny_model(), prompts((40,))
    with (
        attach(model, SignHasher(), dense_layers=0),
        pytest.raises(ValueError, match=rf"{kind}.* use DynamicCache\("),
    ):
        model(ids, past_key_values=odd_cache(kind, model))


def test_something_else_than_a_cache_is_refused():
    model = tiny_model()
    with (
        attach(model, SignHasher()),
        pytest.raises(ValueError, match="must be a transformers Cache, got SimpleNamespace"),
    ):
        model.model.layers[2].self_attn(None, past_key_values=SimpleNamespace())


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [({"position_bias": torch.zeros(1)}, "does not support position_bias"), ({"is_causal": False}, "is causal, got")],
)
def test_attention_of_another_kind_is_refused(asked, sentence):
    model, (ids, _) = tiny_model(), prompts((40,))
    with attach_rows(model, SignHasher(), sparse_rows=0), pytest.raises(ValueError, match=sentence):
        model(ids, **asked)


def test_a_step_of_continuous_batching_is_refused():
    model, (ids, _) = tiny_model(), prompts((40,))
    with attach(model, SignHasher()), pytest.raises(ValueError, match=r"continuous batching; .*vLLM \(sparse-serve\)"):
        model(ids, read_index=[])


def test_an_argument_that_never_was_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'fast'"):
        attach(tiny_model(), SignHasher(), fast=True)


def test_heads_divided_among_processes_are_refused(monkeypatch):
    class Part(torch.nn.Parameter):
        """A tensor of which each process has a part."""

    monkeypatch.setattr("sparse_decode.model.DTensor", Part)
    model = tiny_model()
    module = model.model.layers[2].self_attn.k_proj
    module.weight = Part(module.weight.detach())
    refused("tensor parallelism; load the model in one process, or serve it with vLLM", model, SignHasher())


def test_dropout_is_refused():
    model, (ids, _) = tiny_model(attention_dropout=0.5).train(), prompts((40,))
    with attach_rows(model, SignHasher(), sparse_rows=0), pytest.raises(ValueError, match=r"call model.eval\(\)"):
        model(ids)
