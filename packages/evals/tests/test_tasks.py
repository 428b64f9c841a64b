"""The tasks on models: each number against one computed differently, and resumed runs."""

import json

import numpy as np
import pytest
from evals.methods import DENSE, load_methods
from evals.settings import Always
from evals.synthetic import Exercise
from evals.tasks import fidelity, needle, ruler
from evals.tasks.answers import continue_greedily, read_answer
from evals.tasks.exercises_settings import NeedleCommand, RulerCommand
from evals.tasks.fidelity_settings import FidelityCommand
from hashtrain import models
from rich.console import Console

FIRST_DENSE = Always(1, 0, 0)  # and nothing is always read


QUIET = Console(quiet=True)
PNG = b"\x89PNG"


@pytest.fixture
def dense():
    return load_methods([DENSE], None, None)[0]  # needs neither hashers nor a model


@pytest.fixture
def question(loaded):
    return Exercise("made", 60, 0.0, loaded.ids[:50], loaded.ids[50:60], "")


# Answers


def test_dense_answer_is_the_models_own(loaded, dense, question):
    logits = loaded.model(loaded.ids[None, :59]).logits[0, 49:].log_softmax(-1)
    picked = logits.gather(-1, question.answer[:, None])
    right = logits.argmax(-1) == question.answer
    found = read_answer(loaded.model, question, dense, None, FIRST_DENSE)
    assert found.log_prob == pytest.approx(picked.mean().item(), rel=1e-5)
    assert (found.tokens, found.exact) == (right.float().mean().item(), 0.0)


def test_a_greedy_answer_is_exact(loaded, dense, question):
    for method, budget in ((dense, None), (loaded.methods["lsh"], 0.1)):
        written, density = continue_greedily(loaded.model, question.prompt, 6, method, budget, FIRST_DENSE)
        own = Exercise("made", 56, 0.0, question.prompt, written, "")
        found = read_answer(loaded.model, own, method, budget, FIRST_DENSE)
        assert found.exact == found.tokens == 1
        assert (density == 1) == (budget is None)
        changed = Exercise("made", 56, 0.0, question.prompt, written.roll(1), "")
        assert read_answer(loaded.model, changed, method, budget, FIRST_DENSE).tokens < 1


# Runs

COMMANDS = {
    "fidelity": (fidelity, FidelityCommand, {"methods": ("lsh",), "new_tokens": 6}),
    "ruler": (ruler, RulerCommand, {"methods": ("lsh",), "lengths": (250,), "kinds": ("single", "copy")}),
    "needle": (needle, NeedleCommand, {"methods": ("lsh",), "lengths": (100, 200), "depths": (0.0, 1.0)}),
}


@pytest.fixture
def build(command):
    return lambda name, **changed: command(COMMANDS[name][1], **{"documents": 2, **COMMANDS[name][2], **changed})


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_is_whole_and_a_second_one_computes_nothing(build, name, monkeypatch):
    module, command = COMMANDS[name][0], build(name)
    found = module.run(command, QUIET)
    assert found.rows
    assert {row.task for row in found.rows} == {found.config["task"]}
    assert {row.n for row in found.rows} == {2}
    assert (command.out / "figure.png").read_bytes().startswith(PNG)
    text = (command.out / "report.md").read_text()
    for method in command.methods:
        assert method in text
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(models, "_take_a_step", lambda *given: None)  # which loading does
    monkeypatch.setattr(LlamaForCausalLM, "forward", None)
    assert module.run(command, QUIET) == found


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_damaged_sample_is_named(build, name):
    module, command = COMMANDS[name][0], build(name, documents=1)
    module.run(command, QUIET)
    path = command.out / "samples" / "0000.json"
    sample = json.loads(path.read_text())
    key = next(key for key in ("cells", "answers", "layers") if key in sample)
    path.write_text(json.dumps({**sample, key: type(sample[key])()}))
    with pytest.raises(ValueError, match=r"0000\.json is corrupt"):
        module.run(command, QUIET)


def test_rows_of_fidelity_follow_from_the_texts(build):
    from evals.text import edit_similarity, rouge_l

    command = build("fidelity")
    found = fidelity.run(command, QUIET)
    samples = [json.loads((command.out / "samples" / f"000{i}.json").read_text()) for i in range(2)]
    pairs = [(sample["dense"], sample["cells"][0]["text"]) for sample in samples]
    for metric, likeness in (("rouge_l", rouge_l), ("edit_similarity", edit_similarity)):
        expected = np.mean([likeness(*pair) for pair in pairs])
        assert found.one(metric=metric, method="lsh").value == pytest.approx(expected)


def test_a_needle_in_prose_is_scored_by_rouge_against_the_sentence(build, tmp_path):
    from evals.text import rouge_l

    sentences = " ".join(f"Sentence number {n} says nothing of use." for n in range(400))
    (tmp_path / "haystack.txt").write_text(sentences)
    asked = {"needle": "The key is green.", "question": "What is the key like?"}
    command = build("needle", haystack=(tmp_path / "haystack.txt",), lengths=(200,), documents=1, **asked)
    found = needle.run(command, QUIET)
    assert {found.config[name] for name in asked} == set(asked.values())
    assert found.config["haystack"] == ["haystack.txt"]
    (answer, *_) = json.loads((command.out / "samples" / "0000.json").read_text())["answers"]
    line = next(iter(answer["written"].strip().splitlines()), "")
    assert answer["rouge_l"] == rouge_l("The key is green.", line)
