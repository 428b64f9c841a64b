"""One suite of families: which layers of which models are taken, by what they can do; the others are refused in time.

tests/check_families.py runs every family; here are those that differ from the common shape.
"""

import check_families
import pytest
import torch
import torch.nn.functional as F
import transformers
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Attachment, Budget, LshSelector, OracleSelector, attach
from sparse_decode import model as model_module
from sparse_decode.budget import LayerBudget
from sparse_decode.model import FLASH
from sparse_decode_doubles import SIZES, Auditor, SignHasher, generate, prompts, tiny_model
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

WHOLE, FIFTH = Budget(1.0), Budget(0.2, min_tokens=2, sink=0, recent=0)
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 32, "patch_size": 8}
SLIDING = {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "family", ["falcon_h1", "lfm2", "jamba", "qwen3_next", "persimmon", "gpt_neox", "gpt2", "bart", "phi", "minimax"]
)
def test_families_of_other_forms_are_taken(family):
    found = check_families.check(family)
    assert found.verdict == "equal", found.remark


def check(model, hasher, layers, monkeypatch, ids, mask=None, new_tokens=6, **how):
    """Generate dense, attached at 100 %, whose tokens are the same, and at less, each step as in the reference."""
    dense = generate(model, ids, mask, new_tokens, **how)
    with attach(model, hasher, WHOLE, dense_layers=0) as attachment:
        layers = attachment.layers if layers is None else layers
        assert attachment.layers == layers
        assert torch.equal(generate(model, ids, mask, new_tokens, **how), dense)
        assert attachment.density() == dict.fromkeys(layers, 1.0)
    auditor = Auditor(monkeypatch)
    with attach(model, hasher, FIFTH, dense_layers=0):
        generate(model, ids, mask, new_tokens, **how)
    assert auditor.steps == (new_tokens - 1) * len(layers)
    assert torch.equal(generate(model, ids, mask, new_tokens, **how), dense)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
@pytest.mark.parametrize("family", ["falcon_h1", "lfm2", "qwen3_next"])
def test_hybrids_select_by_the_codes_of_their_keys(family, options, monkeypatch):
    model = check_families.build(family, {})
    check(model, LshSelector(model.config), None, monkeypatch, prompts((30, 30))[0], **options)


def test_a_hybrid_layer_is_refused_for_the_host():
    model = check_families.build("falcon_h1", {})
    with (
        attach(model, LshSelector(model.config), dense_layers=0, kv="host"),
        pytest.raises(ValueError, match='kv="host" needs a DynamicCache, got a layer of type LinearAttentionAndFull'),
    ):
        model(prompts((30,))[0])


def gemma4(**changes):
    """Full layers have heads of 32 and one KV head, sliding ones heads of 16 and two."""
    own = {layer: {"head_dim": 32, "num_key_value_heads": 1} for layer in (1, 3)}
    small = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8}
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(**SIZES, **SLIDING, **small, per_layer_config=own, **changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("variant", ["lsh", "planes"])
def test_heads_that_vary_by_layer(variant, monkeypatch):
    model = gemma4()
    shape = ModelShape.of(model.config)
    assert shape.per_layer == ((4, 2, 16), (4, 1, 32), (4, 2, 16), (4, 1, 32))
    check(model, Hasher(HasherConfig(variant, shape)), (1, 3), monkeypatch, *prompts())
    alike = ModelShape.of(tiny_model(head_dim=16).config)
    with pytest.raises(ValueError, match="belongs to another model"):
        attach(model, Hasher(HasherConfig("lsh", alike)))


def test_layers_that_reuse_keys_stay_dense_and_are_refused_for_the_host(monkeypatch):
    model = gemma4(num_kv_shared_layers=2)
    check(model, LshSelector(model.config), (1,), monkeypatch, *prompts())
    with pytest.raises(ValueError, match='kv="host" needs a model whose layers have their own keys, got layer 2'):
        attach(model, LshSelector(model.config), dense_layers=0, kv="host")
    attach(gemma4(), LshSelector(model.config), dense_layers=0, kv="host").detach()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_only_the_text_decoder_of_a_vision_model_is_touched(implementation, monkeypatch):
    torch.manual_seed(0)
    ids = torch.randint(3, 80, (1, 40), generator=torch.Generator().manual_seed(0))
    ids[0, 5:9] = 90
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    config = transformers.Gemma3Config(text_config={**SIZES, **SLIDING}, vision_config=VISION, **tokens)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation(implementation)
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32), "token_type_ids": (ids == 90).long()}
    before = model.config.vision_config._attn_implementation
    with attach(model, SignHasher(kv_heads=2)):
        assert model.config.vision_config._attn_implementation == before
    check(model, SignHasher(), (1, 3), monkeypatch, ids, **inputs)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_decoder_with_cross_attention_sees_all_of_the_encoder(sparse):
    config = transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, add_cross_attention=True)
    model, (ids, _) = transformers.GPT2LMHeadModel(config).eval(), prompts((30,))
    seen = {"encoder_hidden_states": torch.randn(1, 60, 64)}
    dense = model(ids, **seen).logits
    with attach(model, LshSelector(config) if sparse else None, WHOLE) as attachment:
        found = model(ids[:, :-1], **seen)
        last = model(ids[:, -1:], past_key_values=found.past_key_values, **seen).logits
        assert attachment.memory(found.past_key_values)[0] == 2 * 30 * 2 * 64 * 4
    torch.testing.assert_close(torch.cat([found.logits, last], 1), dense, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rule", [None, 0])
def test_cross_attention_stays_dense(rule):
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.MllamaTextConfig(**SIZES, cross_attention_layers=[1, 3], rope_parameters=rope)
    model, (ids, _) = transformers.MllamaForCausalLM(config).eval(), prompts((30,))
    for name, parameter in model.named_parameters():
        if "gate" in name:
            parameter.data.fill_(1.0)  # else nothing of the image would show
    image = {"cross_attention_states": torch.randn(1, 60, 64)}
    seen = torch.ones(1, 1, 30, 60)
    mask = {"cross_attention_mask": torch.zeros(1, 1, 30, 60), "full_text_row_masked_out_mask": seen[..., :1]}

    def logits():
        cache = transformers.DynamicCache(config=model.config)
        first = model(ids, past_key_values=cache, **image, **mask).logits
        step = {key: value[:, :, -1:] for key, value in mask.items()}
        return first, model(ids[:, :1], past_key_values=cache, **step).logits

    dense = logits()
    with Attachment(model, SignHasher(), WHOLE, dense_layers=0, sparse_rows=rule) as attachment:
        assert attachment.layers == (0, 2)
        for found, expected in zip(logits(), dense, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [(40, 40), (40, 27)])
def test_models_of_flash_attention_keep_it_for_prompts_and_dense_layers(lengths, monkeypatch):
    """A double stands in for the library."""
    calls = []

    def flash(module, q, k, v, mask, **options):
        assert module.config._attn_implementation == FLASH, "by this name transformers finds the library"
        rows, n = q.shape[2], k.shape[2]
        seen = torch.ones(rows, n, dtype=torch.bool).tril(n - rows)
        if mask is not None:
            assert mask.shape[1] <= n, "flash-attn takes the mask of padding"
            k, v, n = k[:, :, : mask.shape[1]], v[:, :, : mask.shape[1]], mask.shape[1]  # as transformers does
            seen = torch.ones(rows, n, dtype=torch.bool).tril(n - rows)
            seen = seen & mask[:, None, None].bool() | torch.eye(rows, n, dtype=torch.bool)[:, :n]
        calls.append(rows)
        seen = seen.expand(len(q), 1, rows, n)
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=options["scaling"], enable_gqa=True)
        return out.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, FLASH, flash)
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, name, *_, **__: name)
    plain, model, (ids, mask) = tiny_model(), tiny_model(), prompts(lengths)
    model.config._attn_implementation_internal = FLASH
    with attach(plain, SignHasher(), Budget(0.2), dense_layers=1):
        expected = generate(plain, ids, mask, new_tokens=6)
    with attach(model, SignHasher(), Budget(0.2), dense_layers=1) as attachment:
        assert torch.equal(generate(model, ids, mask, new_tokens=6), expected)
        assert attachment.density().keys() == {1, 2, 3}
    assert calls[:4] == [40] * 4, "the prompt"
    assert set(calls[4:]) <= {1}
    assert model.config._attn_implementation == FLASH
    with attach(model, SignHasher(), Budget(0.2), dense_layers=1):
        assert torch.equal(generate(model, ids, mask, new_tokens=6, cache_implementation="static"), expected)


REFUSED = {
    "falcon": ({"num_key_value_heads": 1, "head_dim": None}, "got FalconAttention, which computes attention itself;"),
    "deepseek_v3": ({"num_key_value_heads": 4}, "multi-head latent attention"),
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


AT_PREFILL = [
    ("xmod", {"is_decoder": True, "default_language": "en_XX"}, 0, "layer 0 must have the 2 KV heads that the hasher"),
    ("xmod", {"is_decoder": True, "default_language": "en_XX"}, 1000, "must have the 2 KV heads .* got keys of 4; the"),
    ("jetmoe", {}, 0, "must attend to the keys in its cache"),
]


@pytest.mark.parametrize(("family", "changes", "below", "words"), AT_PREFILL)
def test_what_the_config_does_not_say_is_refused_at_prefill(family, changes, below, words):
    """Also a prompt below the break-even, whose keys are hashed by a later step."""
    model = check_families.build(family, changes)
    budget = LayerBudget(dense_below=below)
    with attach(model, LshSelector(model.config), budget, dense_layers=0), pytest.raises(ValueError, match=words):
        model(prompts((30,))[0])


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        (torch.float32, {}, "needs bfloat16 or float16, got torch.float32; convert the model"),
        (torch.bfloat16, {"head_dim": 264}, "a multiple of 16 components, at most 256, got 264"),
        (torch.bfloat16, {"head_dim": 272}, "a multiple of 16 components, at most 256, got 272"),
        (torch.bfloat16, {"num_attention_heads": 34, "hidden_size": 544}, "up to 16 query heads per index set, got 17"),
        (torch.bfloat16, {}, None),
    ],
)
def test_what_no_kernel_takes_on_cuda_is_refused_when_attaching(monkeypatch, kind, changes, sentence):
    config = transformers.LlamaConfig(**{**SIZES, "head_dim": 16, **changes})
    model = transformers.LlamaForCausalLM(config).to(kind)
    require = model_module.require
    monkeypatch.setattr(model_module, "require", lambda _, *how: require(torch.device("cuda"), *how))  # it is not there
    if sentence is None:
        return attach(model, LshSelector(config)).detach()
    with pytest.raises(ValueError, match=sentence):
        attach(model, LshSelector(config))
    if "heads" in sentence:  # one set for each query head: a group of one
        attach(model, LshSelector(config, per_query_head=True)).detach()


def test_other_devices_and_other_models_are_refused():
    with pytest.raises(ValueError, match="runs on the CPU or on CUDA, got xpu; move the model"):
        model_module.require(torch.device("xpu"), torch.float32)
    with pytest.raises(ValueError, match="causal language model, got Linear"):
        attach(torch.nn.Linear(2, 2), SignHasher())
