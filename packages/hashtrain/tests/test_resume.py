"""A run that is killed at any time resumes, and ends with the same bits as an uninterrupted one."""

import contextlib
import multiprocessing
import random
import time

import pytest
import torch
from hashtrain import Hasher
from hashtrain.cli import main
from hashtrain.run.workfolder import locked
from hashtrain_runs import model_and_text, stored
from worker_jobs import command_line

KILLS = 6


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
    began = time.monotonic()
    assert main([*arguments, "--out", str(out)]) == 0
    return stored(out), time.monotonic() - began


def started(arguments, out):
    """Run the command in a separate process, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.llama", "hashtrain", "hashtrain.run.pipeline"])
    process = context.Process(target=command_line, args=([*arguments, "--out", str(out)],))
    process.start()
    return process


def checkpoint_since(moment, out):
    """Whether a layer's checkpoint has been written after this time; files may disappear meanwhile."""
    for path in out.glob(".work/layers/*.checkpoint"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime > moment:
                return True
    return False


@pytest.mark.slow
def test_kills_at_random_moments_change_no_bit(arguments, uninterrupted, tmp_path):
    wanted, seconds = uninterrupted
    out, moments, hit = tmp_path / "run", random.Random(0), []
    for number in range(KILLS):
        began, process = time.time(), started(arguments, out)
        while number % 2 and process.is_alive() and not checkpoint_since(began, out):  # half of them in training
            time.sleep(0.01)
        process.join(moments.uniform(0, 0.3) * seconds)
        process.kill()
        process.join()
        layers = list((out / ".work" / "layers").glob("*")) if out.is_dir() else []
        hit.append((process.exitcode, len(layers)))
    assert [code for code, _ in hit].count(-9) >= KILLS // 2, f"most runs were over before they were killed: {hit}"
    assert any(layers for _, layers in hit), f"no run was killed while it trained: {hit}"
    assert main([*arguments, "--out", str(out)]) == 0
    assert stored(out) == wanted
    assert not list(out.glob(".work*"))


def test_a_resumed_run_keeps_its_capture_and_its_finished_layers(arguments, uninterrupted, tmp_path, monkeypatch):
    out = tmp_path / "run"

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("hashtrain.run.pipeline.draw", fail)
    assert main([*arguments, "--out", str(out)]) == 2
    monkeypatch.undo()
    monkeypatch.setattr("hashtrain.run.sources.capture_one", fail)
    monkeypatch.setattr("hashtrain.run.job.evaluate_layer", fail)
    assert main([*arguments, "--out", str(out)]) == 0
    assert stored(out) == uninterrupted[0]


def test_files_of_other_settings_are_not_reused(arguments, uninterrupted, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("hashtrain.run.pipeline.draw", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
        assert main([*arguments, "--out", str(out), "--seed", "1"]) == 2
        assert list((out / ".work" / "layers").iterdir())
    assert main([*arguments, "--out", str(out)]) == 0
    assert stored(out) == uninterrupted[0]


def test_a_damaged_capture_file_is_made_anew(arguments, uninterrupted, tmp_path):
    out = tmp_path / "run"
    assert main(["capture", *arguments, "--out", str(out)]) == 0
    victim = out / ".work" / "train" / "00001.safetensors"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    assert main([*arguments, "--out", str(out)]) == 0
    assert stored(out) == uninterrupted[0]


def test_a_second_run_in_the_same_folder_is_one_sentence(arguments, tmp_path, capsys):
    with locked(tmp_path / "run"):
        assert main([*arguments, "--out", str(tmp_path / "run")]) == 2
    assert "another run is working in" in capsys.readouterr().err


def test_a_killed_run_leaves_the_old_hasher(arguments, tmp_path):
    out = tmp_path / "run"
    assert main([*arguments, "--out", str(out), "--steps", "2"]) == 0
    before = Hasher.from_pretrained(out / "planes").state_dict()
    process = started([*arguments, "--steps", "100000"], out)
    deadline = time.monotonic() + 300
    while not list(out.glob(".work/layers/*.checkpoint")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.join()
    assert list(out.glob(".work/layers/*.checkpoint")), "the run was not killed while it trained"
    after = Hasher.from_pretrained(out / "planes").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


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
