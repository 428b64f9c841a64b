"""The tasks on models: each number against one got another way, and runs that go on where they stopped."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from evals import figures
from evals.commands import (
    CodelengthCommand,
    ConesCommand,
    FidelityCommand,
    NeedleCommand,
    OutputErrorCommand,
    RulerCommand,
)
from evals.lengths import codelength_grid, sentences
from evals.methods import DENSE, load_methods
from evals.plan import MethodsCommand
from evals.result import Result, Row
from evals.synthetic import Exercise
from evals.tasks import codelength, cones, fidelity, needle, output_error, ruler
from evals.tasks.answers import continue_greedily, read_answer
from evals.tasks.setup import identities_of
from hashtrain import Hasher
from hashtrain.usage import UsageError
from matplotlib.figure import Figure
from rich.console import Console
from sparse_decode import Budget, attach

QUIET = Console(quiet=True)
POSITIONS = torch.tensor([40, 64, 100, 127])
PNG = b"\x89PNG"


@pytest.fixture
def dense():
    return load_methods([DENSE], None, None)[0]  # needs neither hashers nor model


@pytest.fixture
def question(loaded):
    return Exercise("made", 60, 0.0, loaded.ids[:50], loaded.ids[50:60], "")


# Output error


def test_whole_budget_has_no_error_and_half_of_it_has(loaded):
    names = ("oracle", "recent", "lsh", "planes", "planes+remainder", "quest", "quest-heads", "magicpig")
    methods = [loaded.methods[name] for name in names]
    found = output_error.measure(loaded.model, loaded.ids, POSITIONS, methods, (1.0, 0.1))
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


@pytest.mark.parametrize("name", ["lsh", "planes+remainder"])
def test_error_is_that_of_an_attachment_in_the_first_layer(loaded, name):
    """The first layer's input is the same whatever the attention, so a sparse model gives the same output there."""
    method, seen = loaded.methods[name], []
    hook = loaded.model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda m, x: seen.append(x[0][0]))
    loaded.model(loaded.ids[None])
    with attach(loaded.model, method.selector, Budget(0.1), dense_layers=0, sparse_rows=0, remainder=method.remainder):
        loaded.model(loaded.ids[None])
    hook.remove()
    dense, sparse = (x[POSITIONS] for x in seen)
    expected = ((sparse - dense).norm(dim=-1) / dense.norm(dim=-1)).mean().item()
    found = output_error.measure(loaded.model, loaded.ids, POSITIONS, [method], (0.1,))
    assert found[output_error.Cell(name, 0.1)]["error"][0] == pytest.approx(expected, rel=1e-4)


# Answers


def test_dense_answer_is_the_models_own(loaded, dense, question):
    logits = loaded.model(loaded.ids[None, :59]).logits[0, 49:].log_softmax(-1)
    picked = logits.gather(-1, question.answer[:, None])
    right = logits.argmax(-1) == question.answer
    found = read_answer(loaded.model, question, dense, None, 1)
    assert found.log_prob == pytest.approx(picked.mean().item(), rel=1e-5)
    assert (found.tokens, found.exact) == (right.float().mean().item(), 0.0)


def test_a_greedy_answer_is_exact(loaded, dense, question):
    for method, budget in ((dense, None), (loaded.methods["lsh"], 0.1)):
        written, density = continue_greedily(loaded.model, question.prompt, 6, method, budget, 1)
        own = Exercise("made", 56, 0.0, question.prompt, written, "")
        found = read_answer(loaded.model, own, method, budget, 1)
        assert found.exact == found.tokens == 1
        assert (density == 1) == (budget is None)
        changed = Exercise("made", 56, 0.0, question.prompt, written.roll(1), "")
        assert read_answer(loaded.model, changed, method, budget, 1).tokens < 1


def test_whole_budget_answers_as_dense(loaded, dense, question):
    whole = read_answer(loaded.model, question, loaded.methods["planes"], 1.0, 1)
    assert whole.log_prob == pytest.approx(read_answer(loaded.model, question, dense, None, 1).log_prob, abs=1e-5)
    some = read_answer(loaded.model, question, loaded.methods["planes"], 0.05, 1)
    assert abs(some.log_prob - whole.log_prob) > 1e-3
    assert some.density < 0.06


@pytest.mark.parametrize("name", ["quest", "quest-heads", "magicpig-bare"])
def test_a_rival_answers_a_short_prompt_by_its_own_rule_in_every_row(loaded, question, name):
    """Behind 49 tokens: Quest has 3 of 4 pages in the first rows, MagicPIG draws; neither takes all that it sees."""
    method = loaded.methods[name]
    found = read_answer(loaded.model, question, method, 0.1, 1)
    how = {"dense_layers": 1, "sparse_rows": 49, "remainder": False}
    with attach(loaded.model, method.selector_after(49), Budget(0.1), **how) as attachment:
        logits = loaded.model(loaded.ids[None, :59]).logits[0, 49:].log_softmax(-1)
    assert found.log_prob == pytest.approx(logits.gather(-1, question.answer[:, None]).mean().item(), rel=1e-5)
    assert found.density < 0.95
    assert set(attachment.density().values()) != {1.0}
    written, density = continue_greedily(loaded.model, question.prompt, 3, method, 0.1, 1)
    assert len(written) == 3
    assert density < 0.95


@pytest.mark.parametrize("kind", [FidelityCommand, RulerCommand, NeedleCommand])
def test_runs_behind_a_prompt_say_so_of_the_rivals(kind, loaded):
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


# Code length


def test_equal_length_worked_out_by_hand():
    bits, iou = np.array([32, 64, 128]), np.array([0.2, 0.3, 0.5])
    assert codelength.equal_length(bits, iou, 0.3) == pytest.approx(64)
    assert codelength.equal_length(bits, iou, 0.4) == pytest.approx(64 * math.sqrt(2))
    assert codelength.equal_length(bits, iou, 0.9) == pytest.approx(128)


@pytest.fixture
def shorter(made, tmp_path):
    """A folder with `planes` of 32 bits and nothing else."""
    hasher = Hasher.from_pretrained(made.hashers / "planes")
    Hasher(replace(hasher.config, bits=32), 5).save_pretrained(tmp_path / "shorter" / "planes")
    return tmp_path / "shorter"


def test_hashers_of_other_lengths_are_measured_beside(command, made, shorter):
    settings = {"methods": ("paper", "planes"), "bits": (32, 128), "rows": 8, "documents": 2}
    asked = command(CodelengthCommand, **settings, more_hashers=(shorter,))
    found = codelength.run(asked, QUIET)
    names = {row.method: row.bits for row in found.rows}
    assert names == {"lsh-32": 32, "lsh-128": 128, "paper": 2 * 64, "planes": 64, "planes at 32": 32}
    at = {"method": "planes at 32", "heads": "kv_head"}
    equal, shorter_by = (found.one(metric=metric, **at) for metric in ("equal_lsh_bits", "times_shorter"))
    assert shorter_by.value == pytest.approx(equal.value / 32)
    assert "| planes at 32 |" in (asked.out / "report.md").read_text()
    own, other = (found.one(metric="iou", heads="kv_head", method=m).value for m in ("planes", "planes at 32"))
    assert own != other
    with pytest.raises(ValueError, match="method_identities"):  # what was measured beside is part of the run
        codelength.run(command(CodelengthCommand, **settings), QUIET)


def test_a_folder_without_hashers_of_another_length_is_refused(command, made, shorter, tmp_path):
    for folders, message in (((tmp_path,), "no hasher of planes"), ((shorter, shorter), "planes of 32 bits")):
        with pytest.raises(ValueError, match=message):
            codelength.run(command(CodelengthCommand, methods=("planes",), more_hashers=folders), QUIET)
    with pytest.raises(ValueError, match="planes of 64 bits"):
        codelength.run(command(CodelengthCommand, methods=("planes",), more_hashers=(made.hashers,)), QUIET)


def made_up(values, bits=(32, 2048)):
    """A result of code lengths in which these hashers equal so many bits of LSH: {method: (own bits, LSH bits)}."""
    at = {"rule": "visible", "density": None, "dense_layers": 2, "sink": 0, "recent": 0, "phase": "rows", "n": 8}
    at |= {"seed": 0, "versions": "", "budget": 0.02, "task": "codelength"}
    rows = []
    for heads, where in (("kv_head", "one set"), ("query_head", "two sets")):
        at |= {"heads": heads, "where": where}
        for length in bits:
            own = {"method": f"lsh-{length}", "variant": "lsh", "bits": length}
            rows.append(Row(metric="iou", value=length / 4096, low=None, high=None, **at, **own))
        for name, (length, equal) in values.items():
            own = {"method": name, "variant": name, "bits": 2 * length if name == "paper" else length}
            rows.append(Row(metric="iou", value=0.4, low=0.3, high=0.5, **at, **own))
            rows.append(Row(metric="equal_lsh_bits", value=equal, low=500.0, high=700.0, **at, **own))
            rows.append(Row(metric="times_shorter", value=equal / length, low=None, high=None, **at, **own))
    config = {"task": "codelength", "bits": list(bits), "methods": ["paper", "planes"], "budgets": [0.02]}
    return Result({**config, "context": 4096, "model": "demo"}, {}, rows)


MADE_UP = made_up({"paper": (128, 640.0), "planes": (128, 2048.0), "planes at 64": (64, 32.0)})


def test_the_sentence_says_where_the_curve_ends():
    middle, long, short = list(sentences(MADE_UP))[:3]
    assert middle == (
        "one set: LSH length that equals `paper` at 128 bits, of which a KV head keeps 2 codes: 640 [500, 700] bits, "
        "5.0 times as many"
    )
    assert (
        long
        == "one set: LSH length that equals `planes` at 128 bits: more than 2048 bits, more than 16.0 times as many"
    )
    assert short == "one set: LSH length that equals `planes` at 64 bits: 32 or fewer bits, 0.5 or less times as many"


def test_the_table_of_lengths_has_a_line_a_hash_and_length():
    table = codelength_grid(MADE_UP)
    assert [[line[0] for line in section] for section in table.sections] == [
        ["lsh at 32", "lsh at 2048"],
        ["paper at 128"],
        ["planes at 64", "planes at 128"],
    ]
    assert table.sections[0][1][1:4] == ["0.5", "", ""]
    assert table.sections[1][0][1:4] == ["0.4 [0.3, 0.5]", "640 [500, 700]", "5.0"]
    assert table.sections[2][1][4:] == ["0.4 [0.3, 0.5]", "more than 2048", "more than 16.0"]
    assert "mean of 8 held-out contexts of 4096 tokens" in table.title


def test_the_figure_of_lengths_has_a_line_a_hash_over_bits():
    figure = Figure()
    figures.draw_codelength(MADE_UP, figure)
    for axes in figure.axes:
        lines = {line.get_label(): line.get_xdata().tolist() for line in axes.get_lines()}
        assert lines == {"lsh": [32, 2048], "paper": [128], "planes": [64, 128]}
        assert axes.get_xticks().tolist() == [32, 64, 128, 2048]


# Runs

COMMANDS = {
    "output-error": (output_error, OutputErrorCommand, {"methods": ("lsh", "planes"), "rows": 8}),
    "fidelity": (fidelity, FidelityCommand, {"methods": ("lsh",), "new_tokens": 6}),
    "ruler": (ruler, RulerCommand, {"methods": ("lsh",), "lengths": (250,), "kinds": ("single", "copy")}),
    "needle": (needle, NeedleCommand, {"methods": ("lsh",), "lengths": (100, 200), "depths": (0.0, 1.0)}),
    "cones": (cones, ConesCommand, {"methods": ("lsh", "planes")}),
    "codelength": (codelength, CodelengthCommand, {"methods": ("planes",), "bits": (32, 64), "rows": 8}),
}
SYNTHETIC = ("ruler", "needle")


@pytest.fixture
def build(made, tmp_path):
    def command(name, **changed):
        _, kind, settings = COMMANDS[name]
        common = {"model": str(made.model), "hashers": made.hashers, "dense_layers": 1, "documents": 2}
        common |= {"budgets": (0.1,), "out": tmp_path / "run"}
        if name not in SYNTHETIC:
            common |= {"text": (made.text,), "context": 128}
        return kind(**{**common, **settings, **changed})

    return command


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

    monkeypatch.setattr(LlamaForCausalLM, "forward", None)
    assert module.run(command, QUIET) == found


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
    with pytest.raises(UsageError, match="got"):
        make()
