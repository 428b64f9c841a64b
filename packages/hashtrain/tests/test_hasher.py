"""The artefact: round trips, rejection of broken or foreign files, and atomic replacement."""

import contextlib
import json

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain import hasher as hasher_module
from hashtrain.config import VARIANTS
from hashtrain.layers import shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma4TextConfig

SHAPE = ModelShape(2, 4, 2, 32, {"rope_theta": 10000.0, "rope_type": "default"})


def make(variant="planes", seed=0):
    return Hasher(HasherConfig(variant, SHAPE, hidden=64, base_model="tiny"), seed)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_default_dtype_changes_no_number(tmp_path, variant, default):
    expected = make(variant)
    expected.save_pretrained(tmp_path)
    torch.set_default_dtype(default)
    try:
        found = make(variant), Hasher.from_pretrained(tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
    for other in found:
        for name, x in expected.state_dict().items():
            assert other.state_dict()[name].dtype == x.dtype
            assert torch.equal(other.state_dict()[name], x)


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_keeps_every_bit(tmp_path, variant):
    made = make(variant, seed=3)
    made.save_pretrained(tmp_path / "h", card="# card")
    read = Hasher.from_pretrained(tmp_path / "h")
    assert read.config == made.config
    assert (tmp_path / "h" / "README.md").read_text() == "# card"
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, read.state_dict()[name])


@pytest.mark.parametrize("dies_at", ["save_tensors", "write_text"])
def test_a_save_that_dies_leaves_the_old_hasher(tmp_path, monkeypatch, dies_at):
    make(seed=1).save_pretrained(tmp_path)
    before = Hasher.from_pretrained(tmp_path).state_dict()

    def die(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(hasher_module, dies_at, die)
    with pytest.raises(KeyboardInterrupt):
        make(seed=2).save_pretrained(tmp_path)
    after = Hasher.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    make().save_pretrained(folder)
    (weights,) = folder.glob("*.safetensors")
    return folder, weights, weights.read_bytes()


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": "magic"}, "variant must be one of"),
        ({"bits": 100}, "multiple of 32"),
        ({"bits": 256}, "does not match config.json"),
        ({"hidden": 65536}, "does not match config.json"),
        (
            {"shape": {"num_layers": 1 << 20, "num_query_heads": 1 << 20, "num_kv_heads": 1, "head_dim": 1 << 20}},
            "expected tensors of 1048576 layers, got 22 tensors",
        ),
        ({"format_version": 1}, "format_version must be 3"),
        ({"weights": "../hasher.safetensors"}, "names no weight file in its own folder"),
        ({"weights": "gone.safetensors"}, "names no weight file in its own folder"),
        ({"weights": f"hasher-{0:012}.safetensors"}, "missing"),
        ({"shape": {"num_layers": 10**9}}, "incomplete|num_layers"),
        ({"surprise": 1}, "unknown hasher config fields"),
    ],
)
def test_an_invalid_config_is_one_sentence(tmp_path, changes, message):
    make().save_pretrained(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        Hasher.from_pretrained(tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_are_those_of_the_modules(variant):
    made = make(variant)
    assert shapes(made.config) == {name: tuple(t.shape) for name, t in made.layer(0).state_dict().items()}


@given(share=st.floats(0, 0.9999), flip=st.integers(1, 255))
@settings(deadline=None, max_examples=25)
def test_every_changed_byte_is_one_sentence_or_harmless(stored, share, flip):
    folder, weights, whole = stored
    before = Hasher.from_pretrained(folder).state_dict()
    at = int(len(whole) * share)
    weights.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
    try:
        with contextlib.suppress(ValueError):
            after = Hasher.from_pretrained(folder).state_dict()
            assert all(torch.equal(before[name], after[name]) for name in before)  # such as the header's padding
    finally:
        weights.write_bytes(whole)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"num_hidden_layers": 3}, "layers"),
        ({"num_attention_heads": 8}, "query heads"),
        ({"num_key_value_heads": 1}, "KV heads"),
        ({"head_dim": 64}, "head_dim"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "RoPE"),
    ],
)
def test_a_hasher_of_another_model_is_refused(tiny_config, changes, fact):
    make().require_match(tiny_config())
    with pytest.raises(ValueError, match=f"expected {fact}"):
        make().require_match(tiny_config(**changes))


def heterogeneous(**changes):
    layers = {1: {"head_dim": 32, "num_key_value_heads": 1}}
    settings = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    kinds = ["sliding_attention", "full_attention"]
    return Gemma4TextConfig(**{**settings, "layer_types": kinds, "per_layer_config": layers, **changes})


@pytest.mark.parametrize("variant", ["lsh", "paper", "planes"])
def test_heads_that_vary_by_layer(tmp_path, variant):
    shape = ModelShape.of(heterogeneous())
    assert shape.per_layer == ((4, 2, 16), (4, 1, 32))
    assert shape.at(1) == ModelShape(2, 4, 1, 32, shape.rope)
    Hasher(HasherConfig(variant, shape, hidden=64)).save_pretrained(tmp_path)
    read = Hasher.from_pretrained(tmp_path)
    assert read.config.shape == shape
    for layer, (hq, hkv, d) in enumerate(shape.per_layer):
        codes = read.encode_keys(layer, torch.randn(1, hkv, 3, d))
        planes, weights = read.encode_queries(layer, torch.randn(1, hq, 3, d))
        assert codes.shape[:3] == (1, hkv, 3)
        assert planes.shape == (1, hkv, 3, len(weights), codes.shape[3])
    read.require_match(heterogeneous())
    with pytest.raises(ValueError, match=r"belongs to another model .*heads and head_dim by layer"):
        read.require_match(heterogeneous(per_layer_config={1: {"head_dim": 64, "num_key_value_heads": 1}}))


def test_a_hasher_comes_from_the_hub_and_a_folder_comes_first(tmp_path, monkeypatch):
    make().save_pretrained(tmp_path / "hub")

    def download(name, *, allow_patterns, revision):
        if (name, revision) != ("me/hasher", "v1"):
            raise OSError("404: no such repository\nmore")
        return tmp_path / "hub"

    monkeypatch.setattr(hasher_module, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert Hasher.from_pretrained("me/hasher", revision="v1").config == make().config
    with pytest.raises(ValueError, match=r"no hasher me/none: .* none on the Hub \(404: no such repository\)"):
        Hasher.from_pretrained("me/none")
    make("lsh").save_pretrained("me/hasher")
    assert Hasher.from_pretrained("me/hasher", revision="v1").config.variant == "lsh"
