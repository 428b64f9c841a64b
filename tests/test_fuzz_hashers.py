"""Damaged and lying hashers, and published lists that become one: the law stands in fuzz_damage.py."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from fuzz_damage import LAW, SHAPE, altered, damaged, found
from hashtrain import Hasher, HasherConfig
from hashtrain.artefact.convert import convert
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

# Hashers.


@pytest.fixture(scope="module")
def hasher(folder):
    """A small hasher's folder, and its state."""
    made = Hasher(HasherConfig("planes", SHAPE, bits=32, hidden=4, base_model="tiny"), seed=1)
    made.save_pretrained(folder / "hasher", card="# card")
    config = json.loads((folder / "hasher" / "config.json").read_text())
    return made, config, (folder / "hasher" / config["weights"]).read_bytes()


def laid(folder: Path, config: str | bytes, name: str, weights: bytes) -> Path:
    place = folder / "laid"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_bytes(config.encode("utf-8", "surrogatepass") if isinstance(config, str) else config)
    (place / name).write_bytes(weights)
    return place


def same_state(read: Hasher, made: Hasher) -> bool:
    mine = made.state_dict()
    return read.state_dict().keys() == mine.keys() and all(
        torch.equal(x, mine[n]) for n, x in read.state_dict().items()
    )


@LAW
@given(st.data())
def test_damaged_weights_are_refused_or_harmless(folder, hasher, data):
    made, config, weights = hasher
    place = laid(folder, json.dumps(config), config["weights"], data.draw(damaged(weights)))
    read = found(lambda: Hasher.from_pretrained(place), "laid")
    assert read is None or (same_state(read, made) and read.config == made.config)


@LAW
@given(st.data())
def test_a_header_of_weights_that_lies_is_refused_or_harmless(folder, hasher, data):
    made, config, weights = hasher
    length = int.from_bytes(weights[:8], "little")
    header = data.draw(altered(json.loads(weights[8 : 8 + length]))).encode("utf-8", "surrogatepass")
    forged = len(header).to_bytes(8, "little") + header + weights[8 + length :]
    place = laid(folder, json.dumps(config), config["weights"], forged)
    read = found(lambda: Hasher.from_pretrained(place), "laid")
    assert read is None or same_state(read, made)


@LAW
@given(st.data())
def test_a_config_that_lies_is_refused_or_meant(folder, hasher, data):
    made, config, weights = hasher
    text = data.draw(st.one_of(altered(config), damaged(json.dumps(config).encode())))
    place = laid(folder, text, config["weights"], weights)
    read = found(lambda: Hasher.from_pretrained(place), "laid")
    if read is not None:
        said = json.loads((place / "config.json").read_text())
        again = json.loads(json.dumps({**asdict(read.config), "weights": said["weights"]}))
        if said.get("planes") == 0:
            del said["planes"]  # which asks for the variant's own
        said["shape"] = again["shape"] | said["shape"]  # what is left out has its default
        assert again == again | said, "the hasher is not what its config says"
        assert same_state(read, made)


@pytest.mark.parametrize("name", ["config.json", "weights", "README.md"])
def test_a_hashers_link_out_of_its_folder_is_refused(tmp_path, hasher, name):
    _, config, weights = hasher
    place = laid(tmp_path, json.dumps(config), config["weights"], weights)
    (place / "README.md").write_text("card")
    named = place / (config["weights"] if name == "weights" else name)
    named.rename(tmp_path / "secret")
    named.symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="is a link to a place outside its folder"):
        Hasher.from_pretrained(place)


def test_the_links_of_the_hubs_cache_are_followed(tmp_path, hasher):
    made, config, weights = hasher
    (tmp_path / "models--a--b" / "snapshots").mkdir(parents=True)
    place = laid(tmp_path / "models--a--b" / "snapshots", json.dumps(config), config["weights"], weights)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(place.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    assert same_state(Hasher.from_pretrained(place), made)


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path, hasher):
    _, config, weights = hasher
    place = laid(tmp_path, json.dumps(config), config["weights"], weights)
    (place / config["weights"]).unlink()
    os.mkfifo(place / config["weights"])
    with pytest.raises(ValueError, match="is not a regular file"):
        Hasher.from_pretrained(place)


def test_a_hasher_of_numbers_that_are_not_finite_is_refused(tmp_path):
    made = Hasher(HasherConfig("lsh", SHAPE, bits=32), seed=1)
    made.layer(0).remainder[0, 0] = float("nan")
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"non-finite numbers in layers\.0\.remainder"):
        Hasher.from_pretrained(tmp_path)


def test_a_header_of_many_megabytes_is_refused_unread(tmp_path, hasher):
    _, config, _ = hasher
    place = laid(tmp_path, json.dumps(config), config["weights"], (90 << 20).to_bytes(8, "little"))
    os.truncate(place / config["weights"], 91 << 20)  # a hole in the file: no disk
    assert found(lambda: Hasher.from_pretrained(place), "its header has 94371840 bytes, expected at most") is None


# Published lists.


MODEL = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=32)


@pytest.fixture(scope="module")
def published(folder):
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 1, 32, 32), (1, 1, 1, 32)] * 2
    torch.save([torch.randn(size, generator=generator).bfloat16() for size in sizes], folder / "whole.pth")
    whole = convert(folder / "whole.pth", MODEL, folder / "converted")
    return whole, (folder / "whole.pth").read_bytes()


@LAW
@given(st.data())
def test_a_damaged_published_file_is_refused_or_harmless(folder, published, data):
    whole, content = published
    (folder / "damaged.pth").write_bytes(data.draw(damaged(content)))
    read = found(lambda: convert(folder / "damaged.pth", MODEL, folder / "out.pth"), "damaged.pth")
    assert read is None or same_state(read, whole)
