"""Uploading to and downloading from the hub, with a double that has the signatures of huggingface_hub."""

import inspect
import shutil

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.artefact import hasher as hasher_module
from huggingface_hub import HfApi, errors, hub_mixin, snapshot_download

SHAPE = ModelShape(2, 4, 2, 32)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder in place of the hub."""
    root = tmp_path / "hub"
    calls = []

    class Api:
        def __init__(self, token=None):
            calls.append(token)

        def create_repo(self, *args, **kwargs):
            inspect.signature(HfApi.create_repo).bind(self, *args, **kwargs)
            return type("Url", (), {"repo_id": kwargs["repo_id"]})

        def upload_folder(self, *args, **kwargs):
            inspect.signature(HfApi.upload_folder).bind(self, *args, **kwargs)
            shutil.copytree(kwargs["folder_path"], root / kwargs["repo_id"])
            return "commit"

    def download(*args, **kwargs):
        given = inspect.signature(snapshot_download).bind(*args, **kwargs).arguments
        if not (root / given["repo_id"]).is_dir():
            raise errors.RepositoryNotFoundError("404: no such repository\nmore", response=_Response())
        assert {"config.json", "hasher-*.safetensors"} <= set(given["allow_patterns"])
        assert given["revision"] == "v1"
        return str(root / given["repo_id"])

    monkeypatch.setattr(hub_mixin, "HfApi", Api)
    monkeypatch.setattr(hasher_module, "snapshot_download", download)
    return calls


class _Response:
    headers, request = {}, None


def test_a_hasher_goes_to_the_hub_and_back_with_its_card(hub, tmp_path):
    made = Hasher(HasherConfig("planes", SHAPE, hidden=16, base_model="owner/model", base_revision="abc"), seed=3)
    made.save_pretrained(tmp_path / "local", card="# measured")
    assert Hasher.from_pretrained(tmp_path / "local").push_to_hub("me/hasher", token="secret") == "commit"
    assert hub == ["secret"]
    found = Hasher.from_pretrained("me/hasher", revision="v1")
    assert found.config == made.config
    assert found.card == "# measured"
    assert all(torch.equal(x, found.state_dict()[name]) for name, x in made.state_dict().items())


def test_what_is_neither_a_folder_nor_on_the_hub_is_one_sentence(hub):
    with pytest.raises(ValueError, match=r"there is no such folder, and none on the Hub \(404: no such repository\)$"):
        Hasher.from_pretrained("me/none", revision="v1")


def test_a_path_is_never_looked_up_on_the_hub(hub, tmp_path):
    for path in (tmp_path / "none", "runs/demo/none", "./none"):
        with pytest.raises(ValueError, match=r"expected a config\.json there"):
            Hasher.from_pretrained(path)


def test_a_folder_comes_before_a_hub_id(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Hasher(HasherConfig("lsh", SHAPE)).save_pretrained("me/hasher")
    assert Hasher.from_pretrained("me/hasher").config.variant == "lsh"
