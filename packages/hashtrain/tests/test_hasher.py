"""The artefact: round trips, rejection of broken, foreign or published files, and atomic replacement."""

import json
import os
import zipfile

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain import hasher as hasher_module
from hashtrain.config import VARIANTS
from hashtrain.convert import convert
from safetensors.torch import save_file
from torch.nn.functional import silu

SHAPE = ModelShape(2, 4, 2, 32, {"rope_theta": 10000.0, "rope_type": "default"})


def make(variant="planes", seed=0):
    return Hasher(HasherConfig(variant, SHAPE, hidden=64, base_model="tiny"), seed)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_round_trip_keeps_every_bit_whatever_the_default_dtype(tmp_path, variant, default):
    expected = make(variant, seed=3)
    expected.save_pretrained(tmp_path, card="# card")
    assert (tmp_path / "README.md").read_text() == "# card"
    torch.set_default_dtype(default)
    try:
        found = make(variant, seed=3), Hasher.from_pretrained(tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
    for other in found:
        assert other.config == expected.config
        for name, x in expected.state_dict().items():
            assert other.state_dict()[name].dtype == x.dtype
            assert torch.equal(other.state_dict()[name], x)


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


HUGE = {"num_layers": 1 << 20, "num_query_heads": 1 << 20, "num_kv_heads": 1, "head_dim": 1 << 20}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": "magic"}, "variant must be one of"),
        ({"bits": 100}, "multiple of 32"),
        ({"bits": 512, "planes": 8}, "scores must fit 16 bits, got 255 times 512 bits"),
        ({"bits": 256}, "does not match config.json"),
        ({"hidden": 65536}, "does not match config.json"),
        ({"shape": HUGE}, "expected tensors of 1048576 layers, got 22 tensors"),
        ({"shape": {"num_layers": 10**9}}, "incomplete|num_layers"),
        ({"format_version": 1}, "format_version must be 5"),
        ({"weights": "../hasher.safetensors"}, "names no weight file in its own folder"),
        ({"weights": f"hasher-{0:012}.safetensors"}, "missing"),
        ({"surprise": 1}, "unknown hasher config fields"),
    ],
)
def test_an_invalid_config_is_one_sentence(tmp_path, changes, message):
    make().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=message):
        Hasher.from_pretrained(tmp_path)


@pytest.mark.parametrize(("version", "terms", "now"), [(3, 6, None), (4, 5, [1, 1, 1, 1, 0, 1])])
def test_a_hasher_of_a_version_before_loads_and_says_if_it_loses_its_remainder(version, terms, now, tmp_path, caplog):
    made = make()
    made.save_pretrained(tmp_path)
    tensors = {n: torch.ones(len(x), terms) if n.endswith("remainder") else x for n, x in made.state_dict().items()}
    path, weights = tmp_path / "config.json", hasher_module._weights_name(tensors)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": version, "weights": weights}))
    save_file(tensors, tmp_path / weights)
    loaded = Hasher.from_pretrained(tmp_path)
    assert loaded.config.format_version == 5
    assert loaded.remainder(0) is None if now is None else loaded.remainder(0)[1].tolist() == now
    assert torch.equal(loaded.layer(1).key.r, made.layer(1).key.r)
    loaded.save_pretrained(tmp_path)
    Hasher.from_pretrained(tmp_path)
    assert caplog.text.count("is used without its remainder") == (now is None)


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


def published(layers=2, heads=4, d=32):
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, heads, d, d), (1, heads, 1, d), (1, heads, d, d), (1, heads, 1, d)]
    return [torch.randn(size, generator=generator).bfloat16() for _ in range(layers) for size in sizes]


def stored(folder, content):
    torch.save(content, folder / "published.pth")
    return folder / "published.pth"


def test_a_converted_hasher_computes_the_published_function(tmp_path, tiny_config):
    tensors = published()
    convert(stored(tmp_path, tensors), tiny_config(), tmp_path / "h", "tiny")
    hasher = Hasher.from_pretrained(tmp_path / "h")
    p0, b0, p1, b1 = (t.float() for t in tensors[4:])
    x = torch.randn(2, 4, 9, 32, generator=torch.Generator().manual_seed(1))
    h = silu(x @ p0 + b0) + x
    torch.testing.assert_close(hasher.layer(1).values(x), h @ p1 + b1 + h, atol=1e-3, rtol=1e-4)
    assert hasher.config.base_model == "tiny"
    assert "published.pth" in (tmp_path / "h" / "README.md").read_text()


class Surprise:
    def __reduce__(self):
        return os.system, ("touch surprise",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (published()[:4], "4 tensors, 1 layers; expected 8, 2 layers; the published file is truncated"),
        (published(3), "12 tensors, 3 layers; expected 8"),
        (published(heads=8), r"tensor 0 of layer 0: expected floats of \(1, 4, 32, 32\), got torch.bfloat16 \(1, 8,"),
        ([*published()[:7], "text"], "tensor 3 of layer 1: expected floats of .*, got str"),
        ([*published()[:7], torch.zeros(1, 4, 1, 32, dtype=torch.int32)], "expected floats of"),
        ([*published()[:7], torch.full((1, 4, 1, 32), torch.nan)], "tensor 3 of layer 1 is not finite"),
        ({"a": torch.zeros(1)}, "must hold a list of tensors, got dict"),
        ([Surprise()], "damaged or holds more than tensors"),
        ([torch.zeros(1 << 22)], "expected at most"),
    ],
)
def test_other_content_is_one_sentence_and_nothing_is_written(tmp_path, tiny_config, content, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        convert(stored(tmp_path, content), tiny_config(), tmp_path / "h")
    assert [file.name for file in tmp_path.iterdir()] == ["published.pth"]


def test_a_small_file_that_holds_a_large_one_is_refused(tmp_path, tiny_config):
    path = tmp_path / "bomb.pth"
    with zipfile.ZipFile(path, "w", compression=zipfile.ZIP_DEFLATED) as new:
        new.writestr("archive/data.pkl", bytes(9 << 20))
    with pytest.raises(ValueError, match="expected at most"):
        convert(path, tiny_config(), tmp_path / "h")
