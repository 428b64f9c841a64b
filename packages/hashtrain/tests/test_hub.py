"""Hashers of the Hub, with a double that has the signature of huggingface_hub."""

import inspect

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain import hasher as hasher_module
from huggingface_hub import snapshot_download

SHAPE = ModelShape(2, 4, 2, 32)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A hasher that the Hub has as `me/hasher`."""
    hasher = Hasher(HasherConfig("planes", SHAPE, hidden=16, base_model="owner/model", base_revision="abc"), seed=3)
    hasher.save_pretrained(tmp_path / "hub" / "me" / "hasher")

    def download(*args, **kwargs):
        given = inspect.signature(snapshot_download).bind(*args, **kwargs).arguments
        assert ({"config.json", "hasher-*.safetensors"} <= set(given["allow_patterns"]), given["revision"]) == (
            True,
            "v1",
        )
        if not (tmp_path / "hub" / given["repo_id"]).is_dir():
            raise OSError("404: no such repository\nmore")
        return str(tmp_path / "hub" / given["repo_id"])

    monkeypatch.setattr(hasher_module, "snapshot_download", download)
    return hasher


def test_a_hasher_comes_from_the_hub_and_a_folder_comes_first(made, tmp_path, monkeypatch):
    found = Hasher.from_pretrained("me/hasher", revision="v1")
    assert found.config == made.config
    assert all(torch.equal(x, found.state_dict()[name]) for name, x in made.state_dict().items())
    with pytest.raises(ValueError, match=r"no hasher me/none: .* none on the Hub \(404: no such repository\)"):
        Hasher.from_pretrained("me/none", revision="v1")
    with pytest.raises(ValueError, match="no hasher at"):
        Hasher.from_pretrained(tmp_path / "none")  # a path is never looked up
    monkeypatch.chdir(tmp_path)
    Hasher(HasherConfig("lsh", SHAPE)).save_pretrained("me/hasher")
    assert Hasher.from_pretrained("me/hasher").config.variant == "lsh"
