"""The tasks on models and devices: each number against one computed differently, and resumed runs."""

import itertools
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from evals import cli, machine, runner, setup
from evals.documents import TokenDocument, load_documents
from evals.methods import DENSE, SELECTION_NAMES, load_methods
from evals.metrics import by_place
from evals.results import read_result
from evals.runner import RunFolder, environment_of
from evals.settings import Always
from evals.synthetic import Exercise
from evals.tasks import fidelity, iou, needle, ppl, throughput
from evals.tasks.answers import continue_greedily
from evals.tasks.iou import HEADS, METRICS, Cell, measure
from evals.tasks.needle import log_prob
from evals.tasks.settings import FidelityCommand, IouCommand, NeedleCommand, PplCommand, ThroughputCommand
from evals.tasks.throughput import quantiles, timed
from evals.text import rouge_l
from hashtrain import models
from hashtrain.data.capture import capturing
from hashtrain.evaluation.metrics import Quality, quality_of_scores
from hashtrain.training.target import attention
from rich.console import Console
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

FIRST_DENSE = Always(1, 0, 0)  # and nothing is always read
QUIET = Console(quiet=True)
EVERY = ("oracle", "recent", "lsh", "paper", "planes+remainder", "transform", "quest", "quest-heads", "magicpig-bare")
SELECT = ("oracle", "recent", "lsh", "paper", "planes", "transform", "quest")
TASKS = {
    "ppl": (ppl, PplCommand, {"methods": EVERY, "rules": ("visible",)}),
    "iou": (iou, IouCommand, {"rows": 4, "methods": SELECT}),
    "needle": (needle, NeedleCommand, {"methods": ("planes+remainder", "quest"), "lengths": (96,), "depths": (0.5,)}),
    "fidelity": (fidelity, FidelityCommand, {"methods": ("planes", "magicpig"), "new_tokens": 4}),
}


@pytest.fixture
def build(command):
    """Return the command of a task on one document."""
    return lambda name, **changed: command(TASKS[name][1], **{"documents": 1, **TASKS[name][2], **changed})


def test_paths_give_contexts_in_turn_and_shorter_contexts_end_where_longer_ones_do(made):
    paths, tokenizer = [made.text / f"{n}.txt" for n in (2, 0, 3)], AutoTokenizer.from_pretrained(made.model)
    whole = load_documents(paths, tokenizer, 64, 5, 0)
    assert [document.name for document in whole] == ["2.txt", "0.txt", "3.txt", "2.txt#2", "0.txt#2"]
    for document, end in zip(whole, load_documents(paths, tokenizer, 16, 5, 0, within=64), strict=True):
        assert (document.name, document.ids[-16:].tolist()) == (end.name, end.ids.tolist())


def test_dense_answer_is_the_models_own(loaded):
    question = Exercise(60, 0.0, loaded.ids[:50], loaded.ids[50:60], "")
    logits = loaded.model(loaded.ids[None, :59]).logits[0, 49:].log_softmax(-1)
    picked = logits.gather(-1, question.answer[:, None])
    found = log_prob(loaded.model, question, load_methods([DENSE], None, None)[0], None, FIRST_DENSE)
    assert found == pytest.approx(picked.mean().item(), rel=1e-5)


def test_a_greedy_answer_is_more_likely_than_another_whatever_the_models_settings(loaded, monkeypatch):
    prompt = loaded.ids[:50]
    for method, budget in ((load_methods([DENSE], None, None)[0], None), (loaded.methods["lsh"], 0.1)):
        written, density = continue_greedily(loaded.model, prompt, 6, method, budget, FIRST_DENSE)
        monkeypatch.setattr(loaded.model.generation_config, "repetition_penalty", 1e-3)
        assert torch.equal(continue_greedily(loaded.model, prompt, 6, method, budget, FIRST_DENSE)[0], written)
        assert (density == 1) == (budget is None)
        answers = (Exercise(56, 0.0, prompt, answer, "") for answer in (written, written.roll(1)))
        own, other = (log_prob(loaded.model, answer, method, budget, FIRST_DENSE) for answer in answers)
        assert own > other


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TASKS)
def test_a_run_in_bfloat16_is_whole_a_second_one_computes_nothing_and_a_sample_of_another_text_is_named(
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
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokens": "other"}))
    with pytest.raises(ValueError, match=r"0000\.json is of another text"):
        module.run(command, QUIET)


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


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Open a run on a machine with some values changed, and make or read this many samples."""

    def open_run(samples, **facts):
        monkeypatch.setattr(runner, "environment", lambda device: {**machine.environment(), **facts})
        folder = RunFolder(tmp_path / "run", {"task": "made"})
        for number in range(samples):
            folder.sample(number, TokenDocument(str(number), torch.tensor([number])), dict)
        return environment_of(tmp_path / "run")

    return open_run


def test_a_run_goes_on_with_the_software_of_its_samples_alone(opened, tmp_path):
    assert opened(0, torch="1.0")["torch"] == "1.0"
    first = opened(2)
    for name in ("python", "torch", "transformers", "evals"):
        with pytest.raises(ValueError, match=f"other settings: {name} was {first[name]}, now 9.9; choose another"):
            opened(3, **{name: "9.9"})
        assert environment_of(tmp_path / "run") == first
        assert not (tmp_path / "run" / "samples" / "0002.json").exists()
    assert opened(3, processor="other") == {**first, "processor": "other"}


# Overlap, against slow set arithmetic and against hashtrain's own

NONE = Always(0, 0, 0)  # nothing is read without a search, as in the paper
POSITIONS = torch.tensor([32, 63, 64, 100, 127])


def quality_of(loaded, names, budget, always=NONE):
    methods = [loaded.methods[name] for name in names]
    return measure(loaded.model, loaded.ids, POSITIONS, methods, (budget,), always)


@pytest.mark.parametrize("heads", HEADS)
def test_oracle_is_perfect_and_everything_is_at_the_whole_budget(loaded, heads):
    small, whole = quality_of(loaded, ["oracle"], 0.1), quality_of(loaded, SELECTION_NAMES, 1.0)
    for found in (small[Cell("oracle", 0.1, heads)], *(whole[Cell(name, 1.0, heads)] for name in SELECTION_NAMES)):
        for metric in METRICS:
            assert np.array(found[metric]) == pytest.approx(float(metric != "lost"))


@pytest.mark.parametrize("name", ["lsh", "paper", "planes"])
def test_hashed_methods_agree_with_hashtrain(loaded, name):
    found = quality_of(loaded, [name], 0.1, Always())
    hasher = loaded.methods[name].selector.hasher
    seen = []

    def sink(layer, q, k, v, scaling):
        for heads in HEADS:
            rows, by_query_head = q[:, :, POSITIONS], heads == "query_head"
            p = attention(rows, k, POSITIONS, scaling, "query" if by_query_head else "kv")
            other = quality_of_scores(hasher.layer(layer).scores(rows, k, by_query_head), p, POSITIONS, 0.1)
            figures = {metric: getattr(other, metric)[0].double().mean(-1).tolist() for metric in Quality._fields}
            figures["low"] = np.quantile(other.mass[0].double().numpy(), 0.05, axis=-1).tolist()
            figures["lost"] = (other.mass[0] < 0.5).double().mean(-1).tolist()
            for metric in METRICS:
                seen.append(found[Cell(name, 0.1, heads)][metric][layer] == pytest.approx(figures[metric]))

    with torch.inference_mode(), capturing(loaded.model, sink):
        loaded.model(loaded.ids[None], use_cache=False)
    assert len(seen) == 3 * len(HEADS) * len(METRICS)
    assert all(seen)


def test_models_that_iou_would_measure_wrongly_are_refused(build, tmp_path, made):
    config = json.loads((Path(made.model) / "config.json").read_text())
    shutil.copytree(made.model, tmp_path / "model")
    sliding = {"layer_types": ["sliding_attention"] * config["num_hidden_layers"], "sliding_window": 8}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | sliding))
    with pytest.raises(ValueError, match="full attention in every layer, got sliding_attention"):
        iou.run(build("iou", model=str(tmp_path / "model"), methods=("recent",)), QUIET)


def test_the_mean_excludes_dense_layers():
    # Two documents, two layers, two heads; layer 0 stays dense.
    values = np.array([[[9.0, 9.0], [0.0, 2.0]], [[9.0, 9.0], [2.0, 4.0]]])
    found = {(at["layer"], at["head"]): estimate for at, estimate in by_place(values, [1])}
    places = (None, None), (0, None), (1, None), (1, 1)
    assert [found[place].mean for place in places] == [2, 9, 2, 3]
    assert len(found) == 1 + 2 + 4


# Timings

TINY = {"contexts": (96,), "repeats": 2, "steps": 2, "warmup": 1}


@pytest.fixture
def shape_folder(tmp_path):
    """A folder with only a tiny config."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaConfig(**sizes, num_key_value_heads=2, head_dim=16, vocab_size=64).save_pretrained(tmp_path / "shape")
    return str(tmp_path / "shape")


def test_warm_up_is_left_out_and_quantiles_are_those_of_numpy():
    now = itertools.accumulate(itertools.count())  # 0, 1, 3, 6, 10, 15
    assert timed(lambda: None, 2, 1, clock=lambda: float(next(now))) == [3.0, 5.0]
    # Two repeats of 1, 2, 3 and 3, 4, 5 seconds: the medians of the repeats are 2 and 4.
    found = quantiles([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])
    assert found["p50_ms"].mean == 3000
    assert found["p99_ms"].mean == pytest.approx(500 * (np.percentile([1, 2, 3], 99) + np.percentile([3, 4, 5], 99)))


@pytest.mark.slow
def test_throughput_measures_every_method(shape_folder, tmp_path):
    settings = {"shape": shape_folder, "batches": (1, 2), "dtype": "float32", "budget": 0.1, "out": tmp_path / "run"}
    command = ThroughputCommand(**TINY, **settings)
    found = throughput.run(command, Console(quiet=True))
    assert read_result(command.out).environment == found.environment
    for batch in (1, 2):
        at = {"where": f"96 tokens x {batch}"}
        for method in command.methods:
            p50 = found.one(method=method, metric="p50_ms", **at)
            assert 0 < p50.value <= found.one(method=method, metric="p99_ms", **at).value
            tokens = found.one(method=method, metric="tokens_per_s", **at)
            assert tokens.value == pytest.approx(1000 * batch / p50.value)
        # Three layers of 2 KV heads, 16 numbers of 4 bytes for a key and for a value; 99 tokens while it is measured.
        sizes = {found.one(method=m, metric="kv_bytes", **at).value for m in ("sdpa", "eager", "recent")}
        assert sizes == {batch * 3 * 2 * 99 * 2 * 16 * 4}
        steps = json.loads((tmp_path / "run" / "samples" / f"96x{batch}.json").read_text())["milliseconds"]
        assert {method: np.shape(taken) for method, taken in steps.items()} == dict.fromkeys(command.methods, (2, 2))
        assert found.one(method="planes", metric="p50_ms", **at).sink == 4
        assert found.one(method="planes", metric="code_bytes", **at).value >= batch * 3 * 2 * 99 * 4
        assert 0.08 < found.one(method="planes", metric="p50_ms", **at).density < 0.12
