"""--device and --dtype: every task runs with them, and rivals create tensors on their inputs' device."""

import json
import sys

import pytest
import torch
from evals import cli, setup
from evals.tasks import fidelity, iou, needle, ppl, ruler
from evals.tasks.exercises_settings import NeedleCommand, RulerCommand
from evals.tasks.fidelity_settings import FidelityCommand
from evals.tasks.iou_settings import IouCommand
from evals.tasks.ppl_settings import PplCommand
from rich.console import Console

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


def arranged(command, name, **more):
    """Return the task's module and its command on one document."""
    module, kind, settings = TASKS[name]
    built = {"documents": 1, **settings, **more}
    return module, command(kind, **built)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", TASKS)
def test_every_task_runs_in_bfloat16(command, name, monkeypatch):
    seen = []
    load_model = setup.load_model
    monkeypatch.setattr(setup, "load_model", lambda *given: seen.append(load_model(*given)) or seen[-1])
    module, given = arranged(command, name, dtype="bfloat16")
    result = module.run(given, QUIET)
    assert {p.dtype for p in seen[0][0].parameters()} == {torch.bfloat16}
    assert result.config["dtype"] == json.loads((given.out / "config.json").read_text())["dtype"] == "bfloat16"
    assert result.rows


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the spy below runs without one")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", TASKS)
def test_every_task_runs_on_cuda(command, name, dtype):
    module, given = arranged(command, name, device="cuda", dtype=dtype)
    assert module.run(given, QUIET).rows


def test_float32_on_cuda_is_refused_before_a_model_is_loaded(command, monkeypatch):
    """The kernels take 16-bit types; the error does not need the device."""
    monkeypatch.setattr(setup, "device_for", lambda asked, number: torch.device("cuda"))
    monkeypatch.setattr(setup, "load_model", None)
    module, given = arranged(command, "ppl", device="cuda")
    with pytest.raises(ValueError, match="got float32; give --dtype bfloat16"):
        module.run(given, QUIET)
    assert not given.out.exists()


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
