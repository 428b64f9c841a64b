"""Models whose layers are on several devices, and hashers that follow their keys there."""

from importlib.util import find_spec

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Budget, attach
from sparse_decode.cuda.encode import PlacedHasher
from sparse_decode_doubles import Auditor, generate, prompts, tiny_model
from transformers import AutoModelForCausalLM

PLACED = pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers places models with accelerate")


@PLACED
def test_layers_placed_by_a_device_map_and_read_from_disk(tmp_path, monkeypatch):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    hasher = Hasher(HasherConfig("planes", ModelShape.of(model.config), hidden=16))
    for layer in range(4):
        hasher.layer(layer).remainder.copy_(torch.tensor([-1.0, 0.4, 0.5, 0.1, 0.6]))
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{layer}": "disk" if layer == 3 else "cpu" for layer in range(4)}
    placed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk"
    ).eval()
    assert placed.model.layers[3].self_attn.k_proj.weight.device.type == "meta"
    whole, (ids, mask) = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval(), prompts()
    budget = Budget(0.1, min_tokens=2)
    with attach(whole, hasher, budget):
        expected = generate(whole, ids, mask, new_tokens=8)
    auditor = Auditor(monkeypatch)
    with attach(placed, hasher, budget) as attachment:
        assert torch.equal(generate(placed, ids, mask, new_tokens=8), expected)
        assert auditor.steps == 4 * 7
        assert attachment.layers == (0, 1, 2, 3)
        assert attachment.remainder
    assert torch.equal(generate(placed, ids, mask, new_tokens=8), generate(whole, ids, mask, new_tokens=8))


CHANGES = {
    "added": lambda x: x.add_(1),
    "copied": lambda x: x.copy_(-x),
    "replaced": lambda x: setattr(x, "data", x.data.clone()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_of_a_hasher_follow_the_keys_to_their_device_and_a_copy_there_follows_the_weights(change):
    hasher = Hasher(HasherConfig("lsh", ModelShape(1, 2, 1, 16)))
    placed, other = PlacedHasher(hasher), torch.device("meta")
    first = placed.layer(0, other)
    assert placed.layer(0, other) is first
    assert {x.device.type for x in first.state_dict().values()} == {"meta"}
    CHANGES[change](next(x for x in (*hasher.parameters(), *hasher.buffers()) if x.is_floating_point()))
    second = placed.layer(0, other)
    assert second is not first
    hasher.load_state_dict(hasher.state_dict())
    assert placed.layer(0, other) is not second
    assert placed.layer(0, torch.device("cpu")) is hasher.layer(0)
    assert {x.device.type for x in hasher.state_dict().values()} == {"cpu"}
