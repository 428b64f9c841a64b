"""Models that differ from the common shape: heads that vary by layer, shared keys, a vision tower, what is refused."""

import pytest
import torch
import transformers
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Budget, attach
from sparse_decode_doubles import ATTENTION, FAMILIES, Auditor, SignHasher, generate, prompts, tiny_model

TENTH = Budget(0.1, min_tokens=2, sink=0, recent=0)


def gemma4(**changes):
    """Full layers have heads of 32 and one KV head, sliding ones heads of 16 and two."""
    config = transformers.Gemma4TextConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=8,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=None,
        per_layer_config={layer: {"head_dim": 32, "num_key_value_heads": 1} for layer in (1, 3)},
        **changes,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("variant", ["lsh", "planes"])
def test_heads_that_vary_by_layer(variant, monkeypatch):
    model, (ids, mask) = gemma4(), prompts()
    shape = ModelShape.of(model.config)
    assert shape.per_layer == ((4, 2, 16), (4, 1, 32), (4, 2, 16), (4, 1, 32))
    hasher = Hasher(HasherConfig(variant, shape))
    dense = generate(model, ids, mask)
    auditor = Auditor(monkeypatch)
    with attach(model, hasher, Budget(1.0), dense_layers=0) as attachment:
        assert attachment.layers == (1, 3)
        assert torch.equal(generate(model, ids, mask), dense)
    with attach(model, hasher, TENTH, dense_layers=0):
        generate(model, ids, mask)
    assert auditor.steps == 2 * 2 * 15


def test_layers_that_reuse_keys_stay_dense():
    model, (ids, mask) = gemma4(num_kv_shared_layers=2), prompts()
    dense = generate(model, ids, mask)
    hasher = Hasher(HasherConfig("lsh", ModelShape.of(model.config)))
    with attach(model, hasher, Budget(1.0), dense_layers=0) as attachment:
        assert attachment.layers == (1,)
        assert torch.equal(generate(model, ids, mask), dense)


def test_a_hasher_of_a_model_whose_layers_are_alike_is_refused():
    shape = ModelShape.of(tiny_model(head_dim=16).config)
    with pytest.raises(ValueError, match="belongs to another model"):
        attach(gemma4(), Hasher(HasherConfig("lsh", shape)))


@pytest.fixture(scope="module")
def vision_model():
    torch.manual_seed(0)
    text = dict(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=512,
    )
    vision = dict(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **tokens)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def test_only_the_text_decoder_of_a_vision_model_is_touched(vision_model, monkeypatch):
    ids = torch.randint(3, 80, (1, 40), generator=torch.Generator().manual_seed(0))
    ids[0, 5:9] = 90
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32), "token_type_ids": (ids == 90).long()}
    dense = generate(vision_model, ids, new_tokens=6, **inputs)
    before = vision_model.config.vision_config._attn_implementation
    with attach(vision_model, SignHasher(), Budget(1.0), dense_layers=0) as attachment:
        assert attachment.layers == (1, 3)
        assert vision_model.config.vision_config._attn_implementation == before
        assert torch.equal(generate(vision_model, ids, new_tokens=6, **inputs), dense)
    auditor = Auditor(monkeypatch)
    with attach(vision_model, SignHasher(), TENTH, dense_layers=0):
        generate(vision_model, ids, new_tokens=6, **inputs)
    assert auditor.steps == 2 * 5


def test_sliding_layers_are_dense_in_every_family_that_has_them():
    for family in FAMILIES:
        types = getattr(tiny_model(family).config, "layer_types", None) or ["full_attention"] * 4
        with attach(tiny_model(family), SignHasher(), dense_layers=0) as attachment:
            assert attachment.layers == tuple(i for i, kind in enumerate(types) if kind == "full_attention")


@pytest.mark.parametrize("family", ATTENTION)
def test_learned_sinks_and_soft_capping_matter_to_these_models(family):
    """Guards the tests that hold sparse against dense in these families: without the feature, tokens differ."""
    model, (ids, mask) = tiny_model(family), prompts()
    dense = generate(model, ids, mask)
    attention = model.model.layers[3].self_attn
    if family == "gemma2":
        attention.attn_logit_softcapping = None
    else:
        attention.sinks.fill_(-1e9)
    assert not torch.equal(generate(model, ids, mask), dense)


def test_something_else_than_a_language_model_is_refused():
    with pytest.raises(ValueError, match="causal language model, got Linear"):
        attach(torch.nn.Linear(2, 2), SignHasher())
