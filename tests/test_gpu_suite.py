"""The runner of everything that needs a GPU: what it does with parts that fail, hang, or lack what they need."""

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch

TOOL = "gpu_suite"
ROOT = Path(__file__).resolve().parent.parent


def test_all_parts_together_take_less_than_nine_minutes(tool):
    assert tool.SECONDS < 9 * 60
    assert sum(part.seconds for part in tool.GPU_PARTS) <= tool.SECONDS
    assert all(part.seconds <= tool.SECONDS for part in tool.SIMULATED_PARTS)


def test_the_files_that_parts_run_exist(tool):
    assert all((ROOT / path).is_file() for path in tool.GPU_TESTS)
    for path in ("tests/test_hostsim.py", "tests/test_kernels.py", "benchmarks/gpu.py"):
        assert (ROOT / "packages" / "hashcore" / path).is_file()
    for path in ("tests/test_gather.py", "benchmarks/attention_gpu.py", "benchmarks/decode_gpu.py"):
        assert (ROOT / "packages" / "sparse-decode" / path).is_file()


def test_the_suite_runs_every_test_that_needs_a_gpu(tool):
    found = [path for path in ROOT.glob("packages/*/tests/test_*.py") if "pytest.mark.cuda" in path.read_text("utf-8")]
    run = {ROOT / path for path in (*tool.GPU_TESTS, tool.EVALS_TESTS)}
    assert set(found) == run


@pytest.mark.slow
def test_the_tests_of_a_gpu_fit_the_code_and_the_sanitizer_sees_every_kernel(tool, tmp_path):
    """On the CPU in its place (no_gpu.py): otherwise the first to run them would be somebody with a GPU.

    The kernels are those that the gate compiles, each launched by a small test.
    """
    registers = json.loads((ROOT / "docs" / "results" / "kernels.json").read_text("utf-8"))["registers"]
    launched = [kernel for kernels in tool.LAUNCHED_BY.values() for kernel in kernels.split()]
    assert set(launched) == {kernel for program in registers.values() for kernel in program}
    words, listed = ["-p", "tests.no_gpu", "-m", "cuda", *tool.GPU_TESTS], tmp_path / "names"
    outcome = tool.pytest(500, words, [], TESTS_OF_A_GPU=str(listed))
    assert outcome.status == "passed", outcome.summary
    assert outcome.data["tests"] >= 20
    assert not outcome.data["skipped"]
    names = listed.read_text().splitlines()
    for tests in tool.LAUNCHED_BY:
        assert any(all(word in name for word in tests.split(" and ")) for name in names), f"{tests} names no test"


def test_what_is_not_installed_is_named_and_not_run(tool):
    part = tool.Part("part", 9, ("json", "no_such_module", "no_such.inner"), lambda seconds: pytest.fail("ran"))
    result = tool.run_part(part, 9)
    assert result["status"] == "missing"
    assert result["summary"] == "not installed: no_such_module, no_such.inner"


def test_a_version_that_is_too_old_is_named(tool, monkeypatch):
    assert tool.missing(("torch",)) == []
    monkeypatch.setattr("importlib.metadata.version", {"torch": "2.9.1+cu130"}.__getitem__)
    assert tool.missing(("torch",)) == ["torch 2.11 (here is 2.9.1+cu130)"]


@pytest.mark.slow
def test_a_command_that_hangs_is_stopped_with_its_children(tool, tmp_path):
    child = f"import time; time.sleep(3); open({str(tmp_path / 'alive')!r}, 'w')"
    script = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    begun = time.perf_counter()
    done = tool.command([sys.executable, "-c", script], 1)
    assert (done.code, done.output) == (None, "begun\n")
    assert time.perf_counter() - begun < 3
    time.sleep(max(0, begun + 4.5 - time.perf_counter()))
    assert not (tmp_path / "alive").exists()


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("def test_a(): pass", "passed"),
        ("def test_a(): pass\ndef test_b(): assert 0", "failed"),
        ("import pytest\n@pytest.mark.skip(reason='no')\ndef test_a(): pass", "failed"),
    ],
)
def test_tests_pass_only_if_some_pass_and_none_fail(tool, tmp_path, text, status):
    (tmp_path / "test_it.py").write_text(text)
    files = [str(tmp_path / "test_it.py")]
    assert tool.pytest(60, files, [], PYTEST_DISABLE_PLUGIN_AUTOLOAD="1").status == status


def test_tests_that_take_too_long_are_late(tool):
    assert tool.pytest(0.2, ["tests"], []).status == "late"


def test_a_benchmark_tells_which_bars_it_missed(tool, tmp_path):
    bars = [{"what": "a", "value": 2.0, "asked": ">= 1", "met": True}]
    bars += [{"what": "b", "value": 0.5, "asked": ">= 1", "met": False}]
    (tmp_path / "b.py").write_text(f"print('table')\nprint({json.dumps({'bars': bars})!r})")
    outcome = tool.benchmark(60, str(tmp_path / "b.py"))
    assert outcome.status == "passed"
    assert outcome.summary == "1 of 2 targets met\nb: 0.5, target >= 1"
    (tmp_path / "b.py").write_text("raise SystemExit('it differs')")
    assert tool.benchmark(60, str(tmp_path / "b.py")) == ("failed", "it differs", None)


@pytest.mark.parametrize(
    ("codes", "status"), [((0, 0), "passed"), ((2,), "failed"), ((None,), "late"), ((0, 1), "failed")]
)
def test_training_shows_what_was_predicted_beside_what_it_took(tool, monkeypatch, codes, status):
    """The commands are stood in for: what they say, and the figures that the second one leaves."""
    ran = []

    def command(arguments, seconds):
        code = codes[len(ran)]
        ran.append(arguments)
        if code == 0 and "--dry-run" not in arguments:
            out = Path(arguments[arguments.index("--out") + 1])
            out.mkdir()
            (out / "metrics.json").write_text(json.dumps({"seconds": 12.3}))
        return tool.Done(code, "time to train        7 s\n" if "--dry-run" in arguments else "words")

    monkeypatch.setattr(tool, "command", command)
    outcome = tool.training(60)
    assert outcome.status == status
    assert all(words[words.index("--device") + 1] == "cuda" for words in ran)
    if status == "passed":
        assert outcome.summary == "time to train        7 s\ntook                 12 s in all"


@pytest.mark.parametrize(("foreseen", "beside"), [(12.4, "predicted 12"), (None, "not predicted for this device")])
def test_decoding_shows_what_was_predicted_beside_what_it_took(tool, monkeypatch, foreseen, beside):
    row = {"tokens": 8192, "layer_saves": 10.0, "predicted_to_save": foreseen}
    data = {"rows": [row], "bars": [{"what": "a", "value": 0.5, "asked": "<= 1", "met": True}]}
    monkeypatch.setattr(tool, "command", lambda *_: tool.Done(0, f"table\n{json.dumps(data)}\n"))
    outcome = tool.decoding(60)
    assert outcome.status == "passed"
    assert outcome.summary == f"1 of 1 targets met\n8,192 tokens: a sparse layer saves 10 us ({beside})"
    monkeypatch.setattr(tool, "command", lambda *_: tool.Done(1, "dynamic: differs by 0.5"))
    assert tool.decoding(60) == ("failed", "dynamic: differs by 0.5", None)


@pytest.fixture
def decode(monkeypatch):
    """The benchmark of decoding, with stand-ins for CUDA graphs and the compiler."""
    file = ROOT / "packages" / "sparse-decode" / "benchmarks" / "decode_gpu.py"
    for package in ("hashcore", "sparse-decode"):
        monkeypatch.syspath_prepend(ROOT / "packages" / package / "benchmarks")
    spec = importlib.util.spec_from_file_location("decode_gpu", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Graph:
        def __init__(self, steps):
            self.steps = steps
            self.replay()

        def replay(self):
            for step in self.steps:
                step()

    timing = importlib.import_module("gpu_timing")
    monkeypatch.setattr(timing, "graph_of", Graph)
    monkeypatch.setattr(timing, "graph_time", lambda steps: Graph(steps) and timing.Times(70.0, 60.0, 80.0))
    monkeypatch.setattr(torch, "compile", lambda model, fullgraph: model)
    return module


@pytest.mark.slow
def test_decoding_compares_each_kind_of_cache_with_the_cpu(decode, capsys):
    """Here the CPU with itself: each kind of cache gives the same, and so do the stand-ins."""
    found = decode.run("NVIDIA H200", (200,), device="cpu")
    assert [bar["what"].split()[0] for bar in found["bars"]] == ["dynamic", "padded", "static", "captured", "compiled"]
    assert all(bar["met"] for bar in found["bars"])
    assert found["rows"] == [
        {
            "tokens": 200,
            "dense": 70.0,
            "sparse": 70.0,
            "layer_saves": 0.0,
            "predicted_to_save": pytest.approx(-23, abs=9),
        }
    ]
    assert "200 tokens: dense 70.0 us a step" in capsys.readouterr().out


def test_decoding_notices_an_output_that_differs(decode):
    assert [bar["met"] for bar in decode.bars_of({"static": decode.TOLERANCE, "padded": 0.5})] == [True, False]
    assert decode.predicted("some card", 8192) is None


@pytest.mark.parametrize(("status", "code"), [("passed", 0), ("failed", 1), ("late", 1), ("missing", 1)])
@pytest.mark.parametrize("gpu", [None, {"device": "some"}])
def test_the_exit_code_and_the_last_line_say_what_happened(tool, monkeypatch, capsys, status, code, gpu):
    part = tool.Part("part", 9, (), lambda seconds: tool.Outcome(status, "words"))
    monkeypatch.setattr(tool, "environment", lambda: gpu)
    monkeypatch.setattr(tool, "GPU_PARTS" if gpu else "SIMULATED_PARTS", [part])
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py"])
    assert tool.main() == code
    out = capsys.readouterr().out
    assert ("No GPU was found" in out) is (gpu is None)
    report = json.loads(out.splitlines()[-1])
    assert report["gpu"] == gpu
    assert [(p["part"], p["status"], p["summary"]) for p in report["parts"]] == [("part", status, "words")]
