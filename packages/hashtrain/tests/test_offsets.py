"""Contexts at offsets: the same attention, other keys; and which offsets they get."""

import itertools

import pytest
import torch
import transformers
from hashtrain import Hasher
from hashtrain.cli import main
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.data.capture import capture, run_context
from hashtrain.data.offsets import offset, reach_of
from hashtrain.evaluation.cost import Steps
from hashtrain_runs import command

CONTEXT, REACH = 64, 1024
ROTATED = {
    "Llama": {},
    "Qwen3": {},  # normalises keys before it rotates them
    "GPTNeoX": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    "SmolLM3": {"no_rope_layers": [1, 0], "pad_token_id": 0},  # the second layer is not rotated
}
SCALED = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "linear": {"factor": 2.0},
}


def tiny(family, **changes):
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
    config = getattr(transformers, f"{family}Config")(
        **sizes, num_key_value_heads=2, head_dim=32, max_position_embeddings=REACH, **changes
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize("family", ROTATED)
def test_a_moved_context_has_the_same_attention_and_other_keys(family):
    require_same_attention(tiny(family, **ROTATED[family]))


@pytest.mark.parametrize("kind", SCALED)
def test_a_scaled_rotation_is_moved_too(kind):
    require_same_attention(tiny("Llama", rope_parameters={"rope_type": kind, "rope_theta": 1e4, **SCALED[kind]}))


def require_same_attention(model):
    ids = torch.arange(CONTEXT)
    here, _ = run_context(model, ids, torch.float32)
    there, _ = run_context(model, ids, torch.float32, first=700)
    for layer in range(2):
        q, k, moved_q, moved_k = (x[f"{name}.{layer}"][0] for x in (here, there) for name in ("q", "k"))
        k, moved_k = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, moved_k))
        torch.testing.assert_close(q @ k.mT, moved_q @ moved_k.mT, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(here[f"v.{layer}"], there[f"v.{layer}"], atol=1e-5, rtol=1e-4)
    assert (here["k.0"] - there["k.0"]).abs().max() > 0.1


def test_a_longrope_context_has_the_rotation_of_a_text_that_ends_there():
    factors = {"long_factor": [4.0] * 16, "short_factor": [1.0] * 16, "original_max_position_embeddings": 128}
    model = tiny("Llama", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, **factors})
    ids = torch.arange(CONTEXT) % 97
    assert reach_of(model.config, CONTEXT) == REACH
    whole = torch.cat([torch.zeros(400, dtype=torch.long), ids])
    moved, long = run_context(model, ids, torch.float32, first=400)[0], run_context(model, whole, torch.float32)[0]
    torch.testing.assert_close(moved["k.0"], long["k.0"][:, :, 400:], atol=1e-5, rtol=1e-4)


def test_frequencies_that_follow_what_ran_before_do_not_reach_beyond_their_beginning():
    rope = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 256}
    config = transformers.LlamaConfig(max_position_embeddings=REACH, rope_parameters={"rope_theta": 1e4, **rope})
    assert reach_of(config, CONTEXT) == 256
    with pytest.raises(ValueError, match="expected --reach from 64, the --context, to 256"):
        reach_of(config, CONTEXT, 512)


@pytest.mark.parametrize("count", [2, 3, 6, 17, 40])
def test_a_few_contexts_cover_the_reach(count):
    """No gap between neighbouring offsets is more than twice the narrowest spacing that as many could have."""
    found = sorted(offset(number, CONTEXT, REACH) for number in range(count))
    room = REACH - CONTEXT
    assert (found[0], found[-1]) == (0, room)
    assert max(b - a for a, b in itertools.pairwise(found)) <= 2 * room / (count - 1) + 1


def test_stored_contexts_are_at_their_offsets(model, tmp_path):
    """Fails if the offset is dropped on the way to the model."""
    ids = [torch.arange(CONTEXT), torch.arange(CONTEXT)]
    stored = capture(model, ids, tmp_path, dtype=torch.float32, reach=REACH)
    for number, first in enumerate((0, REACH - CONTEXT)):
        wanted, _ = run_context(model, ids[number], torch.float32, first=first)
        assert torch.equal(stored.keys(number, 1)[0], wanted["k.1"])
    assert not torch.equal(stored.keys(0, 1)[0], stored.keys(1, 1)[0])


def test_steps_at_an_offset_cost_the_same(model):
    """Dense and sparse: a step's rows must be moved with their context."""
    ids, rows = torch.arange(CONTEXT), torch.tensor([40, 63])
    here, there = Steps(model, ids, rows), Steps(model, ids, rows, 700)
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


def test_a_run_records_the_reach_and_hashes_what_it_saw_there(folder, tmp_path):
    """Contexts of 512 tokens, a model of 1,024; fails if the offset is dropped between the command and the model."""
    made = {}
    for name, more in {"default": (), "whole": ("--reach", "1024"), "paper": ("--reach", "512")}.items():
        assert main(command(folder, tmp_path / name, "--only", "lsh", "transform-start", *more)) == 0
        made[name] = [Hasher.from_pretrained(tmp_path / name / kind) for kind in ("lsh", "transform-start")]
        lsh, start = made[name]
        assert (lsh.reach, start.reach) == (None, 512 if name == "paper" else 1024)
    starts = [start.layer(1).key.r for _, start in made.values()]
    assert torch.equal(starts[0], starts[1])
    assert not torch.allclose(starts[0], starts[2], rtol=1e-2)
