"""A run that is killed at any time resumes, and ends with the same bits as an uninterrupted one."""

import contextlib
import multiprocessing
import random
import time

import pytest
from hashtrain.cli import main
from hashtrain.run.workfolder import locked
from hashtrain_runs import model_and_text, stored
from worker_jobs import command_line


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, tiny_config):
    """The arguments of a training of a few seconds, without --out."""
    root = tmp_path_factory.mktemp("resume")
    named = model_and_text(root, tiny_config(vocab_size=4096), 3000)
    sizes = "--context 512 --contexts 3 --held-out 2 --held-out-rows 4 --steps 40 --dense-layers 1 --workers 1"
    only = "--only planes --bits 32 --checkpoint-seconds 0.05"
    return [*named, *f"{sizes} {only}".split()]


@pytest.fixture(scope="module")
def uninterrupted(arguments, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main([*arguments, "--out", str(out)]) == 0
    return stored(out)


def started(arguments, out):
    """Run the command in a separate process, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.llama", "hashtrain", "hashtrain.run.pipeline"])
    process = context.Process(target=command_line, args=([*arguments, "--out", str(out)],))
    process.start()
    return process


def checkpoint_since(moment, out):
    """Whether a layer's checkpoint has been written after this time, in ns; files may disappear meanwhile."""
    for path in out.glob(".work/layers/*.checkpoint"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime_ns > moment:
                return True
    return False


@pytest.mark.parametrize(
    ("only", "steps", "anywhere", "kills"),
    [
        pytest.param("planes --bits 32", 60, 1, 2, marks=pytest.mark.slow),
        *(pytest.param(only, 150, 3, 10, marks=pytest.mark.full) for only in ("planes --bits 32", "transform")),
    ],
)
def test_kills_in_training_and_before_change_no_bit(arguments, only, steps, anywhere, kills, tmp_path):
    """Kills at any moment, then kills in training. A run in waves, cut off in its own process: test_waves.py."""
    given = [*arguments[:-6], *f"--steps {steps} --only {only} --checkpoint-seconds 0".split()]
    began = time.monotonic()
    assert main([*given, "--out", str(tmp_path / "whole")]) == 0
    seconds, out, moments, exits = time.monotonic() - began, tmp_path / "run", random.Random(0), []
    for number in range(anywhere + kills):
        began, process = time.time_ns(), started(given, out)
        if number < anywhere:
            process.join(moments.uniform(0, 0.3) * seconds)
        else:
            while process.is_alive() and not checkpoint_since(began, out):
                time.sleep(0.005)
            process.join(moments.uniform(0, 0.02))  # anywhere within the next steps
        process.kill()
        process.join()
        exits.append(process.exitcode)
        assert number < anywhere or checkpoint_since(began, out), "it was killed before it had trained"
    assert exits == [-9] * len(exits), f"a run was over before it was killed: {exits}"
    assert main([*given, "--out", str(out)]) == 0
    assert stored(out) == stored(tmp_path / "whole")
    assert not list(out.glob(".work*"))


def test_a_resumed_run_keeps_its_capture_and_its_finished_layers(arguments, uninterrupted, tmp_path, monkeypatch):
    out = tmp_path / "run"

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("hashtrain.run.pipeline.card", fail)
    assert main([*arguments, "--out", str(out)]) == 2
    monkeypatch.undo()
    monkeypatch.setattr("hashtrain.run.waves.capture_one", fail)
    monkeypatch.setattr("hashtrain.run.job.layer_quality", fail)
    assert main([*arguments, "--out", str(out)]) == 0
    assert stored(out) == uninterrupted


@pytest.mark.slow
def test_files_of_other_settings_are_not_reused(arguments, uninterrupted, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("hashtrain.run.pipeline.card", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
        assert main([*arguments, "--out", str(out), "--seed", "1"]) == 2
        assert list((out / ".work" / "layers").iterdir())
    assert main([*arguments, "--out", str(out)]) == 0
    assert stored(out) == uninterrupted


def test_a_capture_that_was_cut_off_is_made_anew(arguments, uninterrupted, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("hashtrain.run.pipeline.make", lambda *args: (_ for _ in ()).throw(OSError("the power went")))
        assert main([*arguments, "--out", str(out)]) == 2
    victim = out / ".work" / "train" / "00001.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1])
    assert main([*arguments, "--out", str(out)]) == 0
    assert stored(out) == uninterrupted


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_one_sentence(arguments, tmp_path, capsys):
    with locked(tmp_path / "run"):
        assert main([*arguments, "--out", str(tmp_path / "run")]) == 2
    assert "another run is working in" in capsys.readouterr().err


def test_half_written_files_of_killed_runs_are_swept_away(tmp_path):
    left = ".hashcore-0123456789abcdef"
    ours = [f"{left}/metrics.json", f"planes/{left}/config.json", f".work/train/{left}/.00001.safetensors"]
    theirs = ["notes.txt", ".hidden", "planes/config.json", ".work/train/00000.safetensors", ".hashcore-notes/mine"]
    for name in (*ours, *theirs):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    with locked(tmp_path):
        assert not any((tmp_path / name).parent.exists() for name in ours)
        assert all((tmp_path / name).exists() for name in theirs)
