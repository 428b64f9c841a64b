"""Several processes give the result of one: bit-identical if they share layers, nearly equal if they share rows."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hashtrain.cli import main
from hashtrain.machine.distribute import ALONE, Ranks, device_for
from hashtrain_runs import model_and_text, stored
from worker_jobs import join_late, rank


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, tiny_config):
    root = tmp_path_factory.mktemp("distribute")
    named = model_and_text(root, tiny_config(vocab_size=4096, num_hidden_layers=3), 3000)
    sizes = "--context 512 --contexts 3 --held-out 2 --held-out-rows 64 --steps 30 --dense-layers 1 --workers 1"
    rest = "--only lsh transform --bits 32 --device cpu --checkpoint-seconds 0.05"
    return [*named, *f"{sizes} {rest}".split()]


@pytest.fixture(scope="module")
def alone(arguments, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    assert main([*arguments, "--out", str(out)]) == 0
    return stored(out)


def two_processes(job, *rest):
    """Run two gloo ranks, forked from a process that has imported everything. Returns: their exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.llama", "hashtrain", "hashtrain.run.pipeline"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [context.Process(target=job, args=(number, 2, port, *rest)) for number in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    return [process.exitcode for process in ranks]


def run_two(arguments):
    return two_processes(rank, arguments)


@pytest.mark.slow
def test_no_process_goes_on_before_all_are_connected(tmp_path):
    """Otherwise one that exits early, with an error, breaks connections that are still being made."""
    assert two_processes(join_late, tmp_path) == [0, 0]
    connected, entered = (
        [float((tmp_path / f"{w}-{n}").read_text()) for n in (0, 1)] for w in ("connected", "entered")
    )
    assert min(entered) > max(connected)


@pytest.mark.slow
def test_two_ranks_that_share_layers_make_the_bits_of_one_process(arguments, alone, tmp_path):
    assert run_two([*arguments, "--out", str(tmp_path / "run")]) == [0, 0]
    assert stored(tmp_path / "run") == alone


@pytest.mark.slow
def test_two_ranks_that_share_rows_train_as_one_process(arguments, alone, tmp_path):
    assert run_two([*arguments, "--out", str(tmp_path / "run"), "--spread", "data"]) == [0, 0]
    metrics, files = stored(tmp_path / "run")
    # Compares the losses, not the evaluation: a repair chooses between nearly equal heads.
    one, two = (np.array(m["hashers"]["transform"]["losses"])[:, -10:].mean() for m in (alone[0], metrics))
    assert two == pytest.approx(one, rel=0.08)  # other draws, and few pairs are near the margin
    assert files != alone[1], "the second process had no part in it"


@pytest.mark.slow
def test_rows_that_cannot_be_shared_evenly_are_one_sentence(arguments, tmp_path):
    assert run_two([*arguments, "--out", str(tmp_path / "run"), "--spread", "data", "--rows", "63"]) == [2, 2]
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds torchrun's processes in /proc")
def test_torchrun_restarts_a_killed_rank_which_goes_on_to_the_same_bits(arguments, alone, tmp_path):
    """Five interpreters import torch; that a killed run goes on to the same bits is in test_resume.py."""
    out = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*launcher, "--max-restarts", "2", "-m", "hashtrain", *arguments, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        deadline = time.monotonic() + 120
        while not list(out.glob(".work/layers/*.checkpoint")) and time.monotonic() < deadline:
            time.sleep(0.02)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [int(pid) for pid in children if b"hashtrain" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(ranks[-1], signal.SIGKILL)
        assert process.wait(180) == 0
    assert len(ranks) == 2
    assert stored(out) == alone


def test_every_job_has_one_rank():
    jobs = list(range(7))
    dealt = [Ranks(number, 3).shard(jobs) for number in range(3)]
    assert sorted(job for mine in dealt for job in mine) == jobs
    assert ALONE.shard(jobs) == jobs


def test_a_device_that_is_not_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(device_for("cuda", local)) for local in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert str(device_for("cpu", 1)) == "cpu"
    with pytest.raises(
        ValueError, match="--device cuda:2 does not exist: this machine has 2 CUDA devices, cuda:0 to cuda:1"
    ):
        device_for("cuda:2", 0)
    with pytest.raises(ValueError, match="does not exist"):
        device_for(f"cuda:{10**30}", 0)
