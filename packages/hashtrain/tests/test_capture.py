"""Captured queries and keys are those that attention multiplies, also at offsets, and offsets cover the reach."""

import itertools

import pytest
import torch
import transformers
from hashtrain import Hasher
from hashtrain.cli import main
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.data.capture import capture, capturing, run_context
from hashtrain.data.offsets import PIECES, offset, places, reach_of
from hashtrain.evaluation.calibration import calibrate
from hashtrain.evaluation.cost import Steps
from hashtrain.models import text_decoder
from hashtrain_runs import command
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


def tiny(family, how="sdpa", **changes):
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
    sizes |= dict(num_key_value_heads=2, head_dim=32, sliding_window=16, max_position_embeddings=REACH)
    config = getattr(transformers, f"{family}Config")(**sizes | changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=how).eval().requires_grad_(False)


OWN = {
    "Llama": {},
    "Gemma2": {"query_pre_attn_scalar": 16},  # soft-capped logits, which SDPA rejects
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1},  # learned sinks, which SDPA would silently ignore
    "ModernBertDecoder": {"cls_token_id": 1, "sep_token_id": 2},  # whose output projection is called decoder
}


@pytest.mark.parametrize("family", OWN)
def test_capturing_changes_no_output_and_restores_the_model(family):
    how = "eager" if family in ("Gemma2", "GptOss") else "sdpa"
    model = tiny(family, how, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, **OWN[family])
    ids, seen = torch.arange(1, 41)[None], []
    with torch.no_grad():
        before = model(ids).logits
        with capturing(model, lambda layer, q, k, v, scaling: seen.append((layer, q.shape, k.shape, v.shape, scaling))):
            inside = model(ids).logits
        with pytest.raises(RuntimeError), capturing(model, lambda *a: None):
            raise RuntimeError
        after = model(ids).logits
    assert torch.equal(before, inside)
    assert torch.equal(before, after)
    keys = 4 if family == "ModernBertDecoder" else 2
    assert seen == [(layer, (1, 4, 40, 16), (1, keys, 40, 16), (1, keys, 40, 16), 0.25) for layer in (0, 1)]
    assert text_decoder(model).config._attn_implementation == how


CONTEXT, REACH = 64, 1024
SHORT = {"original_max_position_embeddings": 256}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT}
ROTATED = {
    "Llama": {},
    "Qwen3": {},  # normalises keys before it rotates them
    "GPTNeoX": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    "SmolLM3": {"no_rope_layers": [1, 0], "pad_token_id": 0},  # the second layer is not rotated
    "Llama yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **SHORT}},
    "Llama llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}},
}


@pytest.mark.parametrize("kind", ROTATED)
def test_a_moved_context_has_the_same_attention_and_other_keys(kind):
    model = tiny(kind.split()[0], **ROTATED[kind])
    ids = torch.arange(CONTEXT)
    here, _ = run_context(model, ids, torch.float32)
    there, _ = run_context(model, ids, torch.float32, where=ids + 700)
    for layer in range(2):
        q, k, moved_q, moved_k = (x[f"{name}.{layer}"][0] for x in (here, there) for name in ("q", "k"))
        k, moved_k = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, moved_k))
        torch.testing.assert_close(q @ k.mT, moved_q @ moved_k.mT, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(here[f"v.{layer}"], there[f"v.{layer}"], atol=1e-5, rtol=1e-4)
    assert (here["k.0"] - there["k.0"]).abs().max() > 0.1


def test_a_longrope_context_has_the_rotation_of_a_text_that_ends_there():
    factors = {"long_factor": [4.0] * 16, "short_factor": [1.0] * 16, "original_max_position_embeddings": 128}
    model = tiny("Llama", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, **factors})
    ids = torch.arange(CONTEXT)
    assert reach_of(model.config, CONTEXT) == REACH
    whole = torch.cat([torch.zeros(400, dtype=torch.long), ids])
    moved, long = (
        run_context(model, ids, torch.float32, where=ids + 400)[0],
        run_context(model, whole, torch.float32)[0],
    )
    torch.testing.assert_close(moved["k.0"], long["k.0"][:, :, 400:], atol=1e-5, rtol=1e-4)


def test_frequencies_that_follow_what_ran_before_do_not_reach_beyond_their_beginning():
    rope = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 256}
    config = transformers.LlamaConfig(max_position_embeddings=REACH, rope_parameters={"rope_theta": 1e4, **rope})
    assert reach_of(config, CONTEXT) == 256
    with pytest.raises(ValueError, match="expected --reach from 64, the --context, to 256"):
        reach_of(config, CONTEXT, 512)
    config.rope_parameters |= {"rope_type": "yarn"}
    config.max_position_embeddings = 256  # as in configs that people write by hand
    assert reach_of(config, CONTEXT) == 1024


def test_a_model_that_attends_by_itself_is_refused():
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="got BloomForCausalLM: layer 0 does not; no hasher can be trained for it"):
        run_context(model, torch.arange(9))


@pytest.mark.parametrize("count", [2, 3, 6, 17, 40])
def test_a_few_contexts_cover_the_reach(count):
    """No gap between neighbouring offsets is more than twice the narrowest spacing that as many could have."""
    found = sorted(offset(number, CONTEXT, REACH) for number in range(count))
    room = REACH - CONTEXT
    assert (found[0], found[-1]) == (0, room)
    assert max(b - a for a, b in itertools.pairwise(found)) <= 2 * room / (count - 1) + 1


def test_training_contexts_are_whole_and_torn_in_turn():
    """The whole ones are at the same offsets as without torn ones; pieces lie apart over all of the reach."""
    whole = [places(number, CONTEXT, REACH, torn=False) for number in range(3)]
    found = [places(number, CONTEXT, REACH, torn=True) for number in range(6)]
    assert all(torch.equal(*pair) for pair in zip(whole, found[::2], strict=True))
    for at in found[1::2]:
        assert (at[0], at[-1]) == (0, REACH - 1)
        assert (at.diff() > 1).sum() == PIECES - 1
        assert at.diff().min() == 1
    assert not torch.equal(found[1], found[3])
    assert torch.equal(places(1, CONTEXT, CONTEXT, torn=True), torch.arange(CONTEXT))


def test_the_pieces_of_a_torn_context_see_each_other_from_afar(model):
    """Keys are those of a text with these tokens at these places; the last token still depends on the first."""
    ids, at = torch.arange(CONTEXT), places(1, CONTEXT, REACH, torn=True)
    text = torch.zeros(REACH, dtype=torch.long).scatter(0, at, ids)
    found, long = run_context(model, ids, torch.float32, where=at)[0], run_context(model, text, torch.float32)[0]
    torch.testing.assert_close(found["k.0"], long["k.0"][:, :, at], atol=1e-5, rtol=1e-4)
    ids[0] = 90
    other, _ = run_context(model, ids, torch.float32, where=at)
    assert (found["v.1"][:, :, -1] - other["v.1"][:, :, -1]).abs().max() > 1e-6


def test_stored_contexts_are_at_their_places(model, tmp_path):
    """Fails if the positions are dropped on the way to the model."""
    ids = [torch.arange(CONTEXT)] * 3
    stored = capture(model, ids, tmp_path, dtype=torch.float32, reach=REACH, torn=True)
    found = [stored.keys(number, 1)[0] for number in range(3)]
    for number, k in enumerate(found):
        wanted, _ = run_context(model, ids[number], torch.float32, where=places(number, CONTEXT, REACH, torn=True))
        assert torch.equal(k, wanted["k.1"])
    assert not any(torch.equal(*pair) for pair in itertools.combinations(found, 2))


def test_steps_at_an_offset_cost_the_same(model):
    """Dense and sparse: a step's rows must be moved with their context."""
    ids, rows = torch.arange(CONTEXT), torch.tensor([40, 63])
    here, there = Steps(model, ids, rows), Steps(model, ids, rows, ids + 700)
    torch.testing.assert_close(here.dense, there.dense, atol=1e-4, rtol=1e-4)


def test_a_hasher_tells_its_reach(tiny_config, tmp_path):
    """As recorded; without a record, as far as the contexts that it was trained on."""
    shape = ModelShape.of(tiny_config())
    told = {"reach": 32768, "training": {"context": 4096}}
    for given, wanted in ((told, 32768), ({"training": told["training"]}, 4096), ({}, None)):
        Hasher(HasherConfig("lsh", shape, **given)).save_pretrained(tmp_path)
        assert Hasher.from_pretrained(tmp_path).reach == wanted
    for wrong in (0, -1, 1.5, True, "long", 1 << 32):
        with pytest.raises(ValueError, match="reach must be between 1 and"):
            HasherConfig("lsh", shape, reach=wrong)


def test_a_run_records_the_reach_and_hashes_what_it_saw_there(folder, tmp_path, monkeypatch):
    """Contexts of 512 tokens, a model of 1,024; fails if the offset is dropped between the command and the model, or if
    calibration reads shorter contexts than the reach."""
    starts, lengths = [], []

    def noted(hasher, layer, data, *more):
        lengths.append(data.keys(0, layer)[0].shape[2])
        return calibrate(hasher, layer, data, *more)

    monkeypatch.setattr("hashtrain.run.job.calibrate", noted)
    for reach, more in ((1024, ()), (512, ("--reach", "512"))):
        out = tmp_path / str(reach)
        assert main(command(folder, out, "--only", "lsh", "transform-start", *more)) == 0
        lsh, start = (Hasher.from_pretrained(out / kind) for kind in ("lsh", "transform-start"))
        assert (lsh.reach, start.reach) == (None, reach)
        starts.append(start.layer(1).key.r)
    assert not torch.allclose(*starts, rtol=1e-2)
    assert lengths == [1024] * 4 + [512] * 4  # two hashers of two layers
