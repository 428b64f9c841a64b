"""What exact mode has not: refused in a sentence, before anything runs or is changed."""

import pytest
from sparse_decode import attach
from sparse_decode.generation import exact_refusals
from sparse_decode_doubles import SignHasher, generate, tiny_model
from sparse_decode_exact import attached, prompt
from transformers import AutoModelForCausalLM, Qwen3NextConfig, StaticCache

STATEFUL = {"cache_implementation": "static"}, "StaticLayer in layer 0"
REFUSED = {
    "several sequences": ({"num_return_sequences": 2, "do_sample": True}, "a batch of one sequence, got 2"),
    "beams": ({"num_beams": 2}, "got beam search"),
    "another assistant": ({"prompt_lookup_num_tokens": 2}, "got another assistant"),
    "no cache": ({"use_cache": False}, "got use_cache=False"),
    "a static cache": STATEFUL,
    "chunks": ({"prefill_chunk_size": 8}, "not support prefill_chunk_size, got 8"),
    "guidance": ({"guidance_scale": 2.0}, "not support guidance_scale, got 2.0"),
    "weights": ({"output_attentions": True}, "not support output_attentions, got True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_loop_cannot_do_is_refused_before_anything_runs(case, monkeypatch):
    options, sentence = REFUSED[case]
    model = tiny_model()
    with attached(model):
        monkeypatch.setattr(model, "forward", lambda *_, **__: pytest.fail("something ran"))
        with pytest.raises(ValueError, match=sentence):
            generate(model, prompt(), **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"exact": 0}, "exact must be an integer from 1 to 15, the number of tokens to draft, got 0"),
        ({"exact": 16}, "got 16"),
        ({"exact": True}, "got True"),
        ({"exact": 4, "selector": None}, "got no selector"),
        ({"exact": 4, "sparse_rows": 0}, "needs sparse_rows='decode', got 0"),
        ({"exact": 4, "max_decode_rows": 2}, "needs max_decode_rows=1, got 2"),
        ({"exact": 4, "kv": "host"}, "needs kv='device', got 'host'"),
    ],
)
def test_attach_refuses_what_exact_mode_has_not(options, sentence):
    model = tiny_model()
    plain = type(model)
    with pytest.raises(ValueError, match=sentence):
        attach(model, **{"selector": SignHasher(), **options})
    assert type(model) is plain
    assert model.config._attn_implementation == "sdpa"


def test_a_recurrent_state_is_refused():
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2}
    config = Qwen3NextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, **kinds,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="got LinearAttentionLayer in layer 0"):
        attach(model, SignHasher(), exact=4)


def test_sliding_layers_of_an_older_transformers_are_refused(monkeypatch):
    monkeypatch.setattr(exact_refusals, "SLIDES", False)
    with pytest.raises(ValueError, match=r"needs transformers 5.19 or newer, got \d"):
        attach(tiny_model("gemma3"), SignHasher(), exact=4)
    attach(tiny_model(), SignHasher(), exact=4).detach()


def test_a_static_cache_of_the_callers_is_refused():
    model = tiny_model()
    with attached(model), pytest.raises(ValueError, match="got StaticLayer in layer 0"):
        generate(model, prompt(), past_key_values=StaticCache(config=model.config, max_cache_len=90))
