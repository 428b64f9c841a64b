"""A run that is killed resumes with the same bits, and so does one whose captures are made in waves."""

import contextlib
import json
import multiprocessing
import random
import time

import pytest
import torch
from hashtrain import Hasher, ModelShape
from hashtrain.cli import main
from hashtrain.data import captured
from hashtrain.data.capture import context_bytes, run_context
from hashtrain.data.captured import ROWS, STEPS, Capture
from hashtrain.evaluation import calibration
from hashtrain.files.atomic import save_tensors
from hashtrain.layers import transform
from hashtrain.run import pipeline, waves
from hashtrain.run import prepare as prepare_module
from hashtrain.run.workfolder import locked
from hashtrain.training import choose
from hashtrain_runs import command, stored
from worker_jobs import command_line


@pytest.fixture(scope="module")
def arguments(folder):
    """The arguments of a training of a few seconds; --out comes behind them."""
    sizes, only = "--contexts 3 --held-out 2 --steps 20", "--only planes --bits 32 --checkpoint-seconds 0.05"
    return command(folder, "", *f"{sizes} {only}".split())


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
    """Kills at any moment, then kills in training."""
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
    monkeypatch.setattr("hashtrain.run.waves.run_context", fail)
    monkeypatch.setattr("hashtrain.run.job.layer_quality", fail)
    assert main([*arguments, "--out", str(out)]) == 0
    assert stored(out) == uninterrupted


def test_captures_that_a_run_does_not_need_make_room(arguments, tmp_path, monkeypatch):
    """Those of calibration are none where the reach is the context."""

    def fail(*args):
        raise OSError("the power went")

    monkeypatch.setattr("hashtrain.run.pipeline.make", fail)
    for more, left in (((), 3), (("--reach", "512"), 0)):
        assert main([*arguments, "--out", str(tmp_path / "run"), *more]) == 2
        assert len(list((tmp_path / "run" / ".work" / "far").glob("*"))) == left


@pytest.mark.parametrize("moment", ["make", pytest.param("card", marks=pytest.mark.slow)])
def test_captures_cut_short_and_layers_of_other_settings_are_made_anew(
    arguments, uninterrupted, tmp_path, monkeypatch, moment
):
    def fail(*args):
        raise OSError("the power went")

    out, more = tmp_path / "run", ["--seed", "1"] if moment == "card" else []
    with monkeypatch.context() as patch:
        patch.setattr(f"hashtrain.run.pipeline.{moment}", fail)
        assert main([*arguments, "--out", str(out), *more]) == 2
    if moment == "card":
        assert list((out / ".work" / "layers").iterdir())
    else:
        for victim in ("train/00001", "far/00000"):
            path = out / ".work" / f"{victim}.safetensors"
            path.write_bytes(path.read_bytes()[:-1])
    assert main([*arguments, "--out", str(out)]) == 0
    assert stored(out) == uninterrupted


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_one_sentence(arguments, tmp_path, capsys):
    with locked(tmp_path / "run"):
        assert main([*arguments, "--out", str(tmp_path / "run")]) == 2
    assert "another run is working in" in capsys.readouterr().err


SHAPE = ModelShape(2, 4, 2, 32)


def test_what_is_read_whole_is_stored_whole():
    assert choose.CONTEXTS <= transform.CONTEXTS == prepare_module.STARTED_FROM <= calibration.MAX_CONTEXTS


def test_queries_that_were_kept_are_those_of_all(model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(captured, "FEW", 50)
    ids = torch.randint(0, 97, (512,), generator=torch.Generator().manual_seed(1))  # the first context of `data`
    few = Capture(tmp_path, 1)
    tensors, header = run_context(model, ids, kept=STEPS)
    save_tensors(tensors, few.file(0), metadata=header)
    rows = torch.tensor([510, 30, 510])
    assert (few.stride(0), data.stride(0)) == (10, 1)
    assert torch.equal(few.queries(0, 0, rows), data.queries(0, 0, rows))
    assert torch.equal(data.queries(0, 0, rows), data.read(0, 0)[0][:, :, rows])
    assert torch.equal(few.keys(0, 1)[0], data.keys(0, 1)[0])
    for asked in (torch.tensor([3]), None):
        with pytest.raises(ValueError, match=r"holds the queries of every 10th row alone; .*capture again"):
            few.queries(0, 0, asked)
    with pytest.raises(ValueError, match="damaged"):
        few.values(0, 0)
    size = few.file(0).stat().st_size
    assert 0 < size - context_bytes(SHAPE, 512, torch.bfloat16, STEPS) < 4096  # the header


def test_hashers_are_the_same_bits_in_waves_also_of_a_run_stopped_in_one(folder, tmp_path, monkeypatch, capsys):
    """Four contexts, six steps: the disk that is given has room for the first context and one other."""
    # Only the first context is stored whole and read by a start, a choice or calibration; of others every eighth query.
    readers = (transform, "CONTEXTS"), (choose, "CONTEXTS"), (calibration, "MAX_CONTEXTS")
    for module, name in ((prepare_module, "MAX_CONTEXTS"), (prepare_module, "STARTED_FROM"), *readers):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(captured, "FEW", 60)
    words = "--contexts 4 --steps 6 --rows 32 --checkpoint-seconds 100 --only planes".split()  # noqa: SIM905
    other = context_bytes(SHAPE, 512, torch.bfloat16, STEPS)
    far = 3 * context_bytes(SHAPE, 1024, torch.bfloat16, ROWS)
    always = 2 * context_bytes(SHAPE, 512, torch.bfloat16) + far
    room = ["--disk", f"{(always + 1.5 * other) / 1e9:.9f}"]

    def told(*more):
        capsys.readouterr()
        assert main(command(folder, tmp_path / "dry", *words, *more, "--dry-run")) == 0
        found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["dry_run"]
        return found["disk"], found["waves"]

    assert (told(), told(*room)) == ((always + 3 * other, 1), (always + other, 6))
    original, sizes = pipeline.run_jobs, []

    def noted(*given):
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "waves").glob(".work/[fth]*/*.safetensors")))
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "run_jobs", noted)
        for name, more in (("all", ()), ("waves", room)):
            assert main(command(folder, tmp_path / name, *words, "transform", *more)) == 0
    assert stored(tmp_path / "all") == stored(tmp_path / "waves")
    assert max(sizes) < always + other + 4 * 4096  # headers
    save, made = waves.save_tensors, []

    def dies(tensors, path, metadata):
        made.append(int(path.name[:5]))
        if len(made) == 3 + 2 + 4:  # those of calibration, the first context, the held-out one, and four others
            raise OSError("the power went")
        save(tensors, path, metadata)

    monkeypatch.setattr(waves, "save_tensors", dies)
    assert [main(command(folder, tmp_path / "cut", *words, *room)) for _ in range(2)] == [2, 0]
    assert made[5:] == [1, 2, 3, 1, 1]  # for steps 1, 2, 3, 5; context 0 is always there
    whole, cut = (Hasher.from_pretrained(tmp_path / name / "planes").state_dict() for name in ("all", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
