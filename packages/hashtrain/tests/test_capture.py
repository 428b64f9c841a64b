"""Captured queries and keys are those that attention multiplies."""

import pytest
import torch
import transformers
from hashtrain.data.capture import capturing
from hashtrain.models import text_decoder
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def test_capture_is_post_rope_q_and_k(model):
    ids = torch.arange(1, 41)[None]
    seen = {}
    with torch.no_grad(), capturing(model, lambda layer, *found: seen.update({layer: found})):
        model(ids, use_cache=False)
        layer = model.model.layers[0]
        x = layer.input_layernorm(model.model.embed_tokens(ids))
        q = layer.self_attn.q_proj(x).view(1, 40, 4, 32).transpose(1, 2)
        k = layer.self_attn.k_proj(x).view(1, 40, 2, 32).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(x, torch.arange(40)[None]))
    assert sorted(seen) == [0, 1]
    torch.testing.assert_close(seen[0][0], q)
    torch.testing.assert_close(seen[0][1], k)
    torch.testing.assert_close(seen[0][2], layer.self_attn.v_proj(x).view(1, 40, 2, 32).transpose(1, 2))
    assert seen[0][3] == pytest.approx(32**-0.5)


def test_capturing_changes_no_output_and_restores_the_model(model):
    ids = torch.arange(1, 41)[None]
    with torch.no_grad():
        before = model(ids).logits
        with capturing(model, lambda *a: None):
            inside = model(ids).logits
        with pytest.raises(RuntimeError), capturing(model, lambda *a: None):
            raise RuntimeError
        after = model(ids).logits
    assert torch.equal(before, inside)
    assert torch.equal(before, after)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["Gemma2", "GptOss"])
def test_capturing_changes_no_output_of_models_with_their_own_attention(family):
    """Soft-capped logits and learned sinks: SDPA rejects the former and would silently ignore the latter."""
    torch.manual_seed(0)
    settings = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
    extra = {"Gemma2": {"query_pre_attn_scalar": 16}, "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1}}
    config = getattr(transformers, family + "Config")(
        **settings, **extra[family], vocab_size=97, num_key_value_heads=2, sliding_window=16, pad_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids, seen = torch.arange(1, 41)[None], []
    with torch.no_grad():
        before = model(ids).logits
        with capturing(model, lambda layer, q, k, v, scaling: seen.append((layer, q.shape, k.shape, v.shape, scaling))):
            inside = model(ids).logits
    assert torch.equal(before, inside)
    assert seen == [(layer, (1, 4, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16), 0.25) for layer in (0, 1)]
    assert model.config._attn_implementation == "eager"


def test_a_model_that_calls_its_output_projection_decoder_is_captured():
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertDecoderConfig(**sizes, **tokens, num_hidden_layers=3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    assert not hasattr(model.get_decoder(), "config")
    ids, seen = torch.arange(3, 23)[None], {}
    with torch.no_grad():
        before = model(ids).logits
        with capturing(model, lambda layer, *found: seen.update({layer: found})):
            inside = model(ids).logits
    assert torch.equal(before, inside)
    assert {layer: found[0].shape for layer, found in seen.items()} == dict.fromkeys(range(3), (1, 4, 20, 16))
    assert text_decoder(model).config._attn_implementation == "sdpa"
