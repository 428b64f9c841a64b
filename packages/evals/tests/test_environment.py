"""The environment of a run: stored once, and not replaced while samples from another one exist."""

import pytest
import torch
from evals import machine, runner
from evals.documents import TokenDocument
from evals.runner import RunFolder, environment_of

DOCUMENTS = [TokenDocument(str(i), torch.tensor([i])) for i in range(3)]
SETTINGS = {"task": "made"}


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Open the run on a machine with some values changed, and make or read this many samples."""

    def open_run(samples, **facts):
        changed = {**machine.environment(), **facts}
        monkeypatch.setattr(runner, "environment", lambda device: changed)
        folder = RunFolder(tmp_path / "run", SETTINGS)
        for number in range(samples):
            folder.sample(number, DOCUMENTS[number], lambda sample: None, dict)
        return environment_of(tmp_path / "run")

    return open_run


@pytest.mark.parametrize("name", ["python", "torch", "transformers", "evals"])
def test_other_software_reads_a_run_and_makes_no_sample_of_it(opened, tmp_path, name):
    first = opened(2)
    assert opened(2, **{name: "9.9"}) == first
    sentence = f"has samples made with {name} {first[name]}, this is {name} 9.9; choose another --out"
    with pytest.raises(ValueError, match=sentence):
        opened(3, **{name: "9.9"})
    assert environment_of(tmp_path / "run") == first
    assert not (tmp_path / "run" / "samples" / "0002.json").exists()


def test_hardware_is_listed_once_it_makes_a_sample(opened):
    first = opened(1, processor="one", threads="2")
    assert opened(1, processor="other", threads="2") == first
    assert opened(2, processor="other", threads="2") == {**first, "processor": "one; other"}
    assert opened(3, processor="one", threads="2") == {**first, "processor": "one; other"}
