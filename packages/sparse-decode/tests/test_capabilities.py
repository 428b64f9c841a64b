"""Which layers of which models are taken: by what they can do; and what is refused before a prefill is lost."""

import sys
from pathlib import Path

import pytest
import torch
import transformers
from sparse_decode import Budget, LshSelector, OracleSelector, attach
from sparse_decode import model as model_module
from sparse_decode.attach import attach_rows
from sparse_decode.budget import LayerBudget
from sparse_decode_doubles import Auditor, SignHasher, generate, prompts
from test_families import gemma4

sys.path.append(str(Path(__file__).parents[3] / "tests"))
import check_families

WHOLE, FIFTH = Budget(1.0), Budget(0.2, min_tokens=2)
TEXT = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
VISION = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "family", ["falcon_h1", "lfm2", "jamba", "qwen3_next", "persimmon", "gpt_neox", "gpt2", "bart", "phi", "minimax"]
)
def test_families_of_other_forms_are_taken(family):
    found = check_families.check(family)
    assert found.verdict == "equal", found.remark


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2", "qwen3_next"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_hybrids_select_by_the_codes_of_their_keys(family, options, monkeypatch):
    model = check_families.build(family, {})
    ids, auditor = prompts((30, 30))[0], Auditor(monkeypatch)
    dense = generate(model, ids, new_tokens=5, **options)
    with attach(model, LshSelector(model.config), WHOLE, dense_layers=0):
        assert torch.equal(generate(model, ids, new_tokens=5, **options), dense)
    with attach(model, LshSelector(model.config), FIFTH, dense_layers=0) as attachment:
        generate(model, ids, new_tokens=5, **options)
        assert set(attachment.density()) == set(attachment.layers)
    assert auditor.steps == 2 * 4 * len(attachment.layers)
    assert torch.equal(generate(model, ids, new_tokens=5, **options), dense)


def test_a_hybrid_layer_is_refused_for_the_host():
    model = check_families.build("falcon_h1", {})
    with (
        attach(model, LshSelector(model.config), dense_layers=0, kv="host"),
        pytest.raises(ValueError, match='kv="host" needs a DynamicCache, got a layer of type LinearAttentionAndFull'),
    ):
        model(prompts((30,))[0])


def mllama():
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.MllamaTextConfig(**TEXT, cross_attention_layers=[1, 3], rope_parameters=rope)
    model = transformers.MllamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "gate" in name:
            parameter.data.fill_(1.0)  # else nothing of the image would show
    return model


@pytest.mark.parametrize("rule", [None, 0])
def test_cross_attention_stays_dense(rule):
    model, (ids, _) = mllama(), prompts((30,))
    image = {"cross_attention_states": torch.randn(1, 60, 64)}
    seen = torch.ones(1, 1, 30, 60)
    mask = {"cross_attention_mask": torch.zeros(1, 1, 30, 60), "full_text_row_masked_out_mask": seen[..., :1]}

    def logits():
        cache = transformers.DynamicCache(config=model.config)
        first = model(ids, past_key_values=cache, **image, **mask).logits
        step = {key: value[:, :, -1:] for key, value in mask.items()}
        return first, model(ids[:, :1], past_key_values=cache, **step).logits

    dense = logits()
    with attach_rows(model, SignHasher(), WHOLE, dense_layers=0, sparse_rows=rule) as attachment:
        assert attachment.layers == (0, 2)
        for found, expected in zip(logits(), dense, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_paligemma(implementation):
    torch.manual_seed(0)
    text, vision = {**TEXT, "model_type": "gemma", "head_dim": 16}, {**VISION, "model_type": "siglip_vision_model"}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=90, projection_dim=64, hidden_size=64
    )
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    model.set_attn_implementation(implementation)
    ids = torch.randint(3, 80, (1, 40), generator=torch.Generator().manual_seed(0))
    ids[0, :16] = 90
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32), "token_type_ids": (torch.arange(40) >= 16).long()[None]}
    dense = generate(model, ids, new_tokens=6, **inputs)
    before = model.config.vision_config._attn_implementation
    with attach(model, SignHasher(), WHOLE, dense_layers=0) as attachment:
        assert attachment.layers == (0, 1, 2, 3)
        assert model.config.vision_config._attn_implementation == before
        assert torch.equal(generate(model, ids, new_tokens=6, **inputs), dense)
        assert attachment.density() == dict.fromkeys(range(4), 1.0)


REFUSED = {
    "falcon": (
        {"num_key_value_heads": 1, "head_dim": None},
        "got FalconAttention, which computes attention itself; leave",
    ),
    "mamba": ({}, "modules with a cache argument and a layer_idx, got none in"),
    "openai-gpt": ({}, "modules with a cache argument and a layer_idx, got none in"),
    "hrm_text": ({"num_key_value_heads": 4}, "expected one attention module per cache layer"),
    "dots3_note_text": ({"num_key_value_heads": 4}, "which stores compressed keys"),
}
"""The last has a config whose layers differ, which raises an error of its own where it is asked for all at once."""


@pytest.mark.parametrize("family", REFUSED)
def test_attention_that_cannot_be_attached_to_is_refused(family):
    changes, words = REFUSED[family]
    with pytest.raises(ValueError, match=words):
        attach(check_families.build(family, changes), OracleSelector(), dense_layers=0)


@pytest.mark.parametrize("below", [0, 1000])
def test_a_model_with_other_heads_than_its_config_says_is_refused_at_prefill(below):
    """Also a prompt below the break-even, whose keys are hashed by a later step."""
    model = check_families.build("xmod", {"is_decoder": True, "default_language": "en_XX"})
    ids = prompts((30,))[0]
    with (
        attach(model, LshSelector(model.config), LayerBudget(dense_below=below), dense_layers=0),
        pytest.raises(ValueError, match="layer 0 must have the 2 KV heads that the hasher is for, got keys of 4; the"),
    ):
        model(ids)


def test_keys_that_are_not_those_of_the_cache_are_refused_at_prefill():
    model = check_families.build("jetmoe", {})
    with (
        attach(model, LshSelector(model.config), dense_layers=0),
        pytest.raises(ValueError, match="must attend to the keys in its cache"),
    ):
        model(prompts((30,))[0])


def test_keys_that_other_layers_use_too_are_refused_for_the_host():
    model = gemma4(num_kv_shared_layers=2)
    with pytest.raises(ValueError, match='kv="host" needs a model whose layers have their own keys, got layer 2'):
        attach(model, LshSelector(model.config), dense_layers=0, kv="host")
    attach(gemma4(), LshSelector(model.config), dense_layers=0, kv="host").detach()


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        (torch.float32, {}, "needs bfloat16 or float16, got torch.float32; convert the model"),
        (torch.bfloat16, {"head_dim": 264}, "a multiple of 16 components, at most 256, got 264"),
        (torch.bfloat16, {"head_dim": 272}, "a multiple of 16 components, at most 256, got 272"),
        (
            torch.bfloat16,
            {"num_attention_heads": 34, "hidden_size": 34 * 16},
            "up to 16 query heads per index set, got 17",
        ),
        (torch.bfloat16, {}, None),
    ],
)
def test_what_no_kernel_takes_on_cuda_is_refused_when_attaching(monkeypatch, kind, changes, sentence):
    config = transformers.LlamaConfig(**{**TEXT, "head_dim": 16, **changes})
    model = transformers.LlamaForCausalLM(config).to(kind)
    monkeypatch.setattr(model_module, "_device", lambda *arguments: torch.device("cuda"))  # a GPU that is not there
    if sentence is None:
        return attach(model, LshSelector(config)).detach()
    with pytest.raises(ValueError, match=sentence):
        attach(model, LshSelector(config))
    if "heads" in sentence:  # one set for each query head: a group of one
        attach(model, LshSelector(config, per_query_head=True)).detach()


def test_no_other_device_is_promised():
    with pytest.raises(ValueError, match="runs on the CPU or on CUDA, got xpu; move the model"):
        model_module.require(torch.device("xpu"), torch.float32)
