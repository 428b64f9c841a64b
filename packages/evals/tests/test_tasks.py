"""The tasks on models: each number against one computed differently, and resumed runs."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from evals.base_commands import Always, MethodsCommand
from evals.commands import (
    CodelengthCommand,
    ConesCommand,
    FidelityCommand,
    NeedleCommand,
    OutputErrorCommand,
    RulerCommand,
)
from evals.methods import DENSE, load_methods
from evals.setup import identities_of
from evals.synthetic import Exercise
from evals.tasks import codelength, cones, fidelity, needle, output_error, ruler
from evals.tasks.answers import continue_greedily, read_answer
from hashtrain import models
from hashtrain.usage import UsageError
from rich.console import Console
from sparse_decode import Budget
from sparse_decode.attach import attach_rows

FIRST_DENSE = Always(1, 0, 0)  # and nothing is always read

TENTH = Budget(0.1, sink=0, recent=0)

QUIET = Console(quiet=True)
POSITIONS = torch.tensor([40, 64, 100, 127])
PNG = b"\x89PNG"


@pytest.fixture
def dense():
    return load_methods([DENSE], None, None)[0]  # needs neither hashers nor a model


@pytest.fixture
def question(loaded):
    return Exercise("made", 60, 0.0, loaded.ids[:50], loaded.ids[50:60], "")


# Output error


def test_whole_budget_has_no_error_and_half_of_it_has(loaded):
    names = ("oracle", "recent", "lsh", "planes", "planes+remainder", "quest", "quest-heads", "magicpig")
    methods = [loaded.methods[name] for name in names]
    found = output_error.measure(loaded.model, loaded.ids, POSITIONS, methods, (1.0, 0.1), Always(0, 0, 0))
    for (name, budget), cell in found.items():
        assert len(cell["error"]) == 3
        if budget == 1.0:
            assert cell["density"] == 1
            assert max(cell["error"]) < 1e-5
        elif name in ("oracle", "recent", "lsh", "planes", "planes+remainder"):
            assert min(cell["error"]) > 1e-3
            assert cell["density"] < 0.12
    oracle, recent = (np.mean(found[output_error.Cell(name, 0.1)]["error"]) for name in ("oracle", "recent"))
    assert oracle < recent


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("name", ["lsh", "planes+remainder"])
def test_error_is_that_of_an_attachment_in_the_first_layer(loaded, name, by_head, monkeypatch):
    """The first layer's input does not depend on attention, so a sparse model gives the same output there."""
    method, seen = loaded.methods[name], []
    hook = loaded.model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda m, x: seen.append(x[0][0]))
    loaded.model(loaded.ids[None])
    config = method.selector.hasher.config
    shares = [torch.linspace(0.5, 1.5, config.shape.num_kv_heads).tolist()] * config.shape.num_layers
    monkeypatch.setattr(method.selector.hasher, "config", replace(config, head_shares=shares))
    budget = replace(TENTH, by_head=by_head)
    with attach_rows(loaded.model, method.selector, budget, dense_layers=0, sparse_rows=0, remainder=method.remainder):
        loaded.model(loaded.ids[None])
    hook.remove()
    dense, sparse = (x[POSITIONS] for x in seen)
    expected = ((sparse - dense).norm(dim=-1) / dense.norm(dim=-1)).mean().item()
    always = Always(0, 0, 0, by_head=by_head)
    found = output_error.measure(loaded.model, loaded.ids, POSITIONS, [method], (0.1,), always)
    assert found[output_error.Cell(name, 0.1)]["error"][0] == pytest.approx(expected, rel=1e-4)


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


def test_whole_budget_answers_as_dense(loaded, dense, question):
    whole = read_answer(loaded.model, question, loaded.methods["planes"], 1.0, FIRST_DENSE)
    assert whole.log_prob == pytest.approx(
        read_answer(loaded.model, question, dense, None, FIRST_DENSE).log_prob, abs=1e-5
    )
    some = read_answer(loaded.model, question, loaded.methods["planes"], 0.05, FIRST_DENSE)
    assert abs(some.log_prob - whole.log_prob) > 1e-3
    assert some.density < 0.06


@pytest.mark.parametrize("name", ["quest", "quest-heads", "magicpig-bare"])
def test_a_rival_answers_a_short_prompt_by_its_own_rule_in_every_row(loaded, question, name):
    """After 49 tokens: Quest has 3 of 4 pages in the first rows, MagicPIG draws; neither takes all visible tokens."""
    method = loaded.methods[name]
    found = read_answer(loaded.model, question, method, 0.1, FIRST_DENSE)
    how = {"dense_layers": 1, "sparse_rows": 49, "remainder": False}
    with attach_rows(loaded.model, method.selector_after(49), TENTH, **how) as attachment:
        logits = loaded.model(loaded.ids[None, :59]).logits[0, 49:].log_softmax(-1)
    assert found.log_prob == pytest.approx(logits.gather(-1, question.answer[:, None]).mean().item(), rel=1e-5)
    assert found.density < 0.95
    assert set(attachment.density().values()) != {1.0}
    written, density = continue_greedily(loaded.model, question.prompt, 3, method, 0.1, FIRST_DENSE)
    assert len(written) == 3
    assert density < 0.95


@pytest.mark.parametrize("kind", [FidelityCommand, RulerCommand, NeedleCommand])
def test_identities_of_rivals_depend_on_a_dense_prompt(kind, loaded):
    methods = [loaded.methods[name] for name in ("planes", "quest", "magicpig")]
    found = identities_of(methods, kind())
    assert [found[m.name].removeprefix(m.identity) for m in methods] == ["", "-after-prompt", "-after-prompt"]
    everywhere = identities_of(methods, OutputErrorCommand())
    assert everywhere == {m.name: m.identity for m in methods}


# Cones


def test_geometry_worked_out_by_hand():
    # Queries all along the first axis, keys all along the second: 0, 0 and 90 degrees, one component each.
    q, k = torch.zeros(2, 16, 4), torch.zeros(1, 16, 4)
    q[..., 0], k[..., 1] = 2.0, 3.0
    found = cones.geometry(q, k, torch.Generator().manual_seed(0))
    assert found["angle_qq"] == pytest.approx(0, abs=0.05)
    assert found["angle_kk"] == pytest.approx(0, abs=0.05)
    assert found["angle_qk"] == pytest.approx(90, abs=1e-3)
    assert found["pc1_q"] == found["pc1_k"] == pytest.approx(1)
    assert found["pc2_k"] == pytest.approx(0, abs=1e-12)


def test_occupancy_worked_out_by_hand():
    # Bit 0 of four codes is 0, 1, 1, 1; all other bits never differ; two of four codes are distinct.
    found = cones.occupancy(torch.tensor([[[0], [1], [1], [1]]], dtype=torch.int32))
    entropy = -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))
    assert found["bit_entropy"] == pytest.approx(entropy / 32)
    assert found["distinct_codes"] == 0.5


# Runs

COMMANDS = {
    "output-error": (output_error, OutputErrorCommand, {"methods": ("lsh", "planes"), "rows": 8}),
    "fidelity": (fidelity, FidelityCommand, {"methods": ("lsh",), "new_tokens": 6}),
    "ruler": (ruler, RulerCommand, {"methods": ("lsh",), "lengths": (250,), "kinds": ("single", "copy")}),
    "needle": (needle, NeedleCommand, {"methods": ("lsh",), "lengths": (100, 200), "depths": (0.0, 1.0)}),
    "cones": (cones, ConesCommand, {"methods": ("lsh", "planes")}),
    "codelength": (codelength, CodelengthCommand, {"methods": ("planes",), "bits": (32, 64), "rows": 8}),
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


def test_a_needle_in_prose_is_scored_by_rouge_against_the_sentence(build, tmp_path, monkeypatch):
    from evals.text import rouge_l

    sentences = " ".join(f"Sentence number {n} says nothing of use." for n in range(400))
    (tmp_path / "haystack.txt").write_text(sentences)
    drawn = []
    monkeypatch.setattr(needle, "draw_heat", lambda result, command, path: drawn.append(command.haystack))
    asked = {"needle": "The key is green.", "question": "What is the key like?"}
    command = build("needle", haystack=(tmp_path / "haystack.txt",), lengths=(200,), documents=1, **asked)
    found = needle.run(command, QUIET)
    assert drawn == [command.haystack]
    assert {found.config[name] for name in asked} == set(asked.values())
    assert found.config["haystack"] == ["haystack.txt"]
    (answer, *_) = json.loads((command.out / "samples" / "0000.json").read_text())["answers"]
    line = next(iter(answer["written"].strip().splitlines()), "")
    assert answer["rouge_l"] == rouge_l("The key is green.", line)
    monkeypatch.undo()
    needle.draw_heat(found, command, tmp_path / "heat.png")
    assert (tmp_path / "heat.png").read_bytes().startswith(PNG)


def test_fidelity_at_the_whole_budget_is_dense(build):
    found = fidelity.run(build("fidelity", budgets=(1.0,), documents=1), QUIET)
    assert {row.value for row in found.rows} == {1.0}


@pytest.mark.parametrize(
    "make",
    [
        lambda: FidelityCommand(context=64, new_tokens=64),
        lambda: RulerCommand(kinds=("guess",)),
        lambda: RulerCommand(lengths=()),
        lambda: NeedleCommand(depths=(1.5,)),
        lambda: ConesCommand(methods=("oracle",)),
        lambda: CodelengthCommand(bits=(48,)),
        lambda: CodelengthCommand(budgets=(0.1, 0.2)),
        lambda: MethodsCommand(documents=0),
    ],
)
def test_settings_that_cannot_be_used(make):
    with pytest.raises(UsageError, match=r"got|takes no"):
        make()
