"""The environment of a run: stored once, and not replaced while samples from another one exist."""

import json

import pytest
import torch
from evals import machine, runner
from evals.documents import TokenDocument
from evals.runner import RunFolder, environment_of
from evals.tasks import throughput
from evals.tasks.throughput_settings import ThroughputCommand
from rich.console import Console

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


def test_it_names_software_and_hardware():
    found = machine.environment()
    assert set(found) >= {"python", "torch", "transformers", "evals", "hashcore", *machine.HARDWARE}
    assert found["threads"] == str(torch.get_num_threads())
    assert found["device"] == "cpu"
    assert len(found["processor"]) > 2


def test_a_cuda_device_is_stated_by_its_model(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"model of {device}")
    assert machine.environment("cuda:1")["device"] == "model of cuda:1"


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


def test_a_run_that_states_no_hardware_says_so(opened, tmp_path):
    opened(1)
    path = tmp_path / "run" / "environment.json"
    held = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in held.items() if name not in machine.HARDWARE}))
    assert opened(2, processor="other")["processor"] == "not stored; other"


@pytest.mark.parametrize("text", ["{", '{"python": 3}'])
def test_a_damaged_file_is_named(opened, tmp_path, text):
    opened(1)
    (tmp_path / "run" / "environment.json").write_text(text)
    with pytest.raises(ValueError, match=r"environment\.json is corrupt"):
        opened(2)


def test_times_are_measured_anew_and_so_is_what_they_ran_on(tmp_path):
    sizes = {"shape": "small", "contexts": (64,), "repeats": 1, "steps": 1, "warmup": 0, "bandwidth": 10.0}
    command = ThroughputCommand(**sizes, methods=("sdpa",), out=tmp_path / "run")
    quiet = Console(quiet=True)
    first = throughput.run(command, quiet).environment
    path = tmp_path / "run" / "environment.json"
    path.write_text(json.dumps({**first, "processor": "former", "torch": "0.1"}))
    assert throughput.run(command, quiet).environment == first == json.loads(path.read_text())
