"""Ctrl-C at any time: exit code 130, one sentence, every stored file whole; the same command then finishes the run."""

import json
import multiprocessing
import os
import signal
import time
from unittest import mock

import pytest
from safetensors import safe_open
from tiny_model import as_process, make_model

TRAIN = (
    "--context 512 --contexts 2 --held-out 1 --held-out-rows 4 --steps 40 --dense-layers 0 --bits 32 "
    "--only planes --checkpoint-seconds 0.05"
)
PPL = "--context 256 --documents 4 --methods recent oracle --budgets 0.1 --rules visible"


@pytest.fixture(scope="module")
def model(folder):
    found = make_model(folder, max_position_embeddings=1024)
    (folder / "text.txt").write_text("\n".join(f"def name_{i}(x): return x * {i}" for i in range(3000)))
    return found


def line(program, model, out):
    """The words of a run of a few seconds."""
    given = ["--model", str(model), "--text", str(model.parent / "text.txt"), "--out", str(out)]
    if program == "evals":
        return ["ppl", *given, *PPL.split()]
    return [*given, *TRAIN.split(), "--workers", "1"]


def started(program, words, said, largest=None):
    """Start a command in a process forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tiny_model", "transformers.models.llama", "hashtrain.run.pipeline", "evals.tasks.ppl"]
    )
    process = context.Process(target=as_process, args=(program, words, str(said), largest))
    process.start()
    return process


def ended(program, words, said, largest=None):
    """Run a command to its end; return its exit code and what it said."""
    process = started(program, words, said, largest)
    process.join(300)
    return process.exitcode, said.read_text()


def wait_for(found, process):
    """Wait until there is a file, or the process has ended."""
    deadline = time.monotonic() + 120
    while process.is_alive() and time.monotonic() < deadline and not found():
        time.sleep(0.002)


def interrupted(program, words, said, moment):
    """Start a command, press Ctrl-C at a moment, and return its exit code and what it said."""
    process = started(program, words, said)
    wait_for(moment, process)
    os.killpg(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode is not None, "it goes on"
    return process.exitcode, said.read_text()


def require_whole(out, finished=True):
    """Every file below a folder can be read; in a finished run none is a temporary one.

    Python may be interrupted between making a temporary folder and being ready to remove it: the next run does that.
    """
    for path in sorted(out.rglob("*")):
        if any(part.startswith(".hashcore-") for part in path.parts):
            assert not finished, path
            continue
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            [json.loads(row) for row in path.read_text().splitlines()]
        elif path.suffix == ".safetensors":
            with safe_open(path, "np") as file:
                assert list(file.keys())


def contents(out):
    """The bytes of the hashers, or the numbers of the samples, of a finished run."""
    if hashers := sorted(out.glob("planes/*.safetensors")):
        return [path.read_bytes() for path in hashers]
    samples = [json.loads(path.read_text()) for path in sorted(out.glob("samples/*.json"))]
    return [[(cell["nll"], cell["kl"]) for cell in sample["cells"]] for sample in samples]


@pytest.fixture(scope="module")
def uninterrupted(model, folder):
    """What a run makes that nobody interrupts, by program."""
    found = {}
    for program in ("hashtrain", "evals"):
        out = folder / f"whole-{program}"
        code, said = ended(program, line(program, model, out), folder / "said")
        assert code == 0, said
        found[program] = contents(out)
    assert all(found.values())
    return found


MOMENTS = [("hashtrain", ".work/layers/*.checkpoint"), ("evals", "samples/0001.json")]
"""Ctrl-C is pressed once there is such a file."""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "pattern"), MOMENTS)
def test_an_interrupted_run_leaves_nothing_broken_and_is_finished_by_the_same_command(
    program, pattern, uninterrupted, model, tmp_path
):
    out = tmp_path / "run"
    words = line(program, model, out)
    (tmp_path / "run").mkdir()

    def there():
        return any(out.glob(pattern))

    code, said = interrupted(program, words, tmp_path / "said", there)
    assert code == 130, said
    assert said.splitlines()[-1].startswith(f"{program}: "), said
    assert "Traceback" not in said
    require_whole(out, finished=False)
    assert contents(out) != uninterrupted[program], "the run was over before it was interrupted"
    assert ended(program, words, tmp_path / "again") == (0, mock.ANY)
    assert contents(out) == uninterrupted[program]
    require_whole(out)


@pytest.mark.slow
def test_a_disk_that_is_full_while_capturing_is_one_sentence_and_the_same_command_goes_on(
    uninterrupted, model, tmp_path
):
    words = line("hashtrain", model, tmp_path / "run")
    code, said = ended("hashtrain", words, tmp_path / "said", largest=100_000)
    assert code == 2, said
    assert said.splitlines()[-1].startswith("hashtrain: "), said
    assert "File too large" in said
    assert "Traceback" not in said
    require_whole(tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    assert ended("hashtrain", words, tmp_path / "again") == (0, mock.ANY)
    assert contents(tmp_path / "run") == uninterrupted["hashtrain"]
