"""The tasks on models and devices: each number against one computed differently, and resumed runs."""

import json
import sys

import numpy as np
import pytest
import torch
from evals import cli, machine, runner, setup
from evals.documents import TokenDocument
from evals.methods import DENSE, load_methods
from evals.runner import RunFolder, environment_of
from evals.settings import Always
from evals.synthetic import Exercise
from evals.tasks import fidelity, iou, needle, ppl, ruler
from evals.tasks.answers import continue_greedily, read_answer
from evals.tasks.exercises_settings import NeedleCommand, RulerCommand
from evals.tasks.fidelity_settings import FidelityCommand
from evals.tasks.iou_settings import IouCommand
from evals.tasks.ppl_settings import PplCommand
from evals.text import edit_similarity, rouge_l
from hashtrain import models
from rich.console import Console
from transformers import LlamaForCausalLM

FIRST_DENSE = Always(1, 0, 0)  # and nothing is always read
QUIET = Console(quiet=True)
EVERY = ("oracle", "recent", "lsh", "paper", "planes+remainder", "transform", "quest", "quest-heads", "magicpig-bare")
SELECT = ("oracle", "recent", "lsh", "paper", "planes", "transform", "quest")
TASKS = {
    "ppl": (ppl, PplCommand, {"methods": EVERY, "rules": ("visible",)}),
    "iou": (iou, IouCommand, {"rows": 4, "methods": SELECT}),
    "needle": (needle, NeedleCommand, {"methods": ("planes+remainder", "quest"), "lengths": (96,), "depths": (0.5,)}),
    "ruler": (ruler, RulerCommand, {"methods": ("planes",), "lengths": (96,), "kinds": ("copy",)}),
    "fidelity": (fidelity, FidelityCommand, {"methods": ("planes", "magicpig"), "new_tokens": 4}),
}


@pytest.fixture
def build(command):
    """Return the command of a task on one document."""
    return lambda name, **changed: command(TASKS[name][1], **{"documents": 1, **TASKS[name][2], **changed})


# Answers


def test_dense_answer_is_the_models_own(loaded):
    question = Exercise("made", 60, 0.0, loaded.ids[:50], loaded.ids[50:60], "")
    logits = loaded.model(loaded.ids[None, :59]).logits[0, 49:].log_softmax(-1)
    picked = logits.gather(-1, question.answer[:, None])
    right = logits.argmax(-1) == question.answer
    found = read_answer(loaded.model, question, load_methods([DENSE], None, None)[0], None, FIRST_DENSE)
    assert found.log_prob == pytest.approx(picked.mean().item(), rel=1e-5)
    assert (found.tokens, found.exact) == (right.float().mean().item(), 0.0)


def test_a_greedy_answer_is_exact(loaded):
    prompt = loaded.ids[:50]
    for method, budget in ((load_methods([DENSE], None, None)[0], None), (loaded.methods["lsh"], 0.1)):
        written, density = continue_greedily(loaded.model, prompt, 6, method, budget, FIRST_DENSE)
        assert (density == 1) == (budget is None)
        for answer in (written, written.roll(1)):
            own = Exercise("made", 56, 0.0, prompt, answer, "")
            found = read_answer(loaded.model, own, method, budget, FIRST_DENSE)
            assert (found.exact == found.tokens == 1) == (answer is written)


# Runs


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", TASKS)
def test_a_run_in_bfloat16_is_whole_a_second_one_computes_nothing_and_a_damaged_sample_is_named(
    build, name, monkeypatch
):
    seen, load_model = [], setup.load_model
    monkeypatch.setattr(setup, "load_model", lambda *given: seen.append(load_model(*given)) or seen[-1])
    module, command = TASKS[name][0], build(name, dtype="bfloat16")
    found = module.run(command, QUIET)
    assert {p.dtype for p in seen[0][0].parameters()} == {torch.bfloat16}
    assert found.config["dtype"] == json.loads((command.out / "config.json").read_text())["dtype"] == "bfloat16"
    assert {(row.task, row.n) for row in found.rows} == {(found.config["task"], 1)}
    assert (command.out / "figure.png").read_bytes().startswith(b"\x89PNG")
    text = (command.out / "report.md").read_text()
    assert all(method in text for method in command.methods)
    monkeypatch.setattr(models, "_take_a_step", lambda *given: None)  # which loading does
    monkeypatch.setattr(LlamaForCausalLM, "forward", None)
    assert module.run(command, QUIET) == found
    path = command.out / "samples" / "0000.json"
    sample = json.loads(path.read_text())
    key = next(key for key in ("cells", "answers", "layers") if key in sample)
    path.write_text(json.dumps({**sample, key: type(sample[key])()}))
    with pytest.raises(ValueError, match=r"0000\.json is corrupt"):
        module.run(command, QUIET)


def test_rows_of_fidelity_follow_from_the_texts(build):
    command = build("fidelity", documents=2, methods=("lsh",))
    found = fidelity.run(command, QUIET)
    samples = [json.loads((command.out / "samples" / f"000{i}.json").read_text()) for i in range(2)]
    pairs = [(sample["dense"], sample["cells"][0]["text"]) for sample in samples]
    for metric, likeness in (("rouge_l", rouge_l), ("edit_similarity", edit_similarity)):
        expected = np.mean([likeness(*pair) for pair in pairs])
        assert found.one(metric=metric, method="lsh").value == pytest.approx(expected)


def test_a_needle_in_prose_is_scored_by_rouge_against_the_sentence(build, tmp_path):
    sentences = " ".join(f"Sentence number {n} says nothing of use." for n in range(400))
    (tmp_path / "haystack.txt").write_text(sentences)
    asked = {"needle": "The key is green.", "question": "What is the key like?"}
    command = build("needle", haystack=(tmp_path / "haystack.txt",), lengths=(200,), methods=("lsh",), **asked)
    found = needle.run(command, QUIET)
    assert {found.config[name] for name in asked} == set(asked.values())
    assert found.config["haystack"] == ["haystack.txt"]
    (answer, *_) = json.loads((command.out / "samples" / "0000.json").read_text())["answers"]
    line = next(iter(answer["written"].strip().splitlines()), "")
    assert answer["rouge_l"] == rouge_l("The key is green.", line)


# Devices


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the tests below run without one")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", TASKS)
def test_every_task_runs_on_cuda(build, name, dtype):
    assert TASKS[name][0].run(build(name, device="cuda", dtype=dtype), QUIET).rows


def test_float32_on_cuda_is_refused_before_a_model_is_loaded(build, monkeypatch):
    """The kernels take 16-bit types; the error does not need the device."""
    monkeypatch.setattr(setup, "device_for", lambda asked, number: torch.device("cuda"))
    monkeypatch.setattr(setup, "load_model", None)
    command = build("ppl", device="cuda")
    with pytest.raises(ValueError, match="got float32; give --dtype bfloat16"):
        ppl.run(command, QUIET)
    assert not command.out.exists()


@pytest.mark.parametrize("task", ["ppl", "iou", "needle", "throughput"])
@pytest.mark.parametrize(
    ("count", "sentence"),
    [
        (0, "--device cuda:1 does not exist: this machine has no CUDA device that torch can use; use --device cpu\n"),
        (2, "hashcore needs cuda-core to compile its CUDA kernels, and it is not installed"),
    ],
)
def test_a_device_that_cannot_be_used(made, tmp_path, capsys, monkeypatch, task, count, sentence):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    words = ["--device", "cuda:1", "--out", str(tmp_path / "run")]
    if task != "throughput":
        words += ["--model", str(made.model), "--hashers", str(made.hashers)]
    assert cli.main([task, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"evals: {sentence}")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


# The environment is stored once, and not replaced while samples from another one exist


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Open a run on a machine with some values changed, and make or read this many samples."""

    def open_run(samples, **facts):
        changed = {**machine.environment(), **facts}
        monkeypatch.setattr(runner, "environment", lambda device: changed)
        folder = RunFolder(tmp_path / "run", {"task": "made"})
        for number in range(samples):
            folder.sample(number, TokenDocument(str(number), torch.tensor([number])), lambda sample: None, dict)
        return environment_of(tmp_path / "run")

    return open_run


def test_other_software_reads_a_run_and_makes_no_sample_of_it(opened, tmp_path):
    first = opened(2)
    for name in ("python", "torch", "transformers", "evals"):
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
