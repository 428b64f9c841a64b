"""Jobs in several processes: in order, independent of their number, and with no process left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from hashtrain import ModelShape, device
from hashtrain.device import device_for, here
from hashtrain.run import waves, workers
from hashtrain.run.workers import run_jobs
from hashtrain_runs import model_and_text
from safetensors.torch import load_file
from worker_jobs import die, fail, square

SHAPE = ModelShape(30, 4, 2, 32)


@pytest.mark.slow
def test_results_are_in_the_order_of_the_jobs_and_each_has_one_thread():
    before = torch.get_num_threads()
    for count in (1, 2):
        said = []
        found = run_jobs(square, [1, 2, 3, 4], count, lambda *message, said=said: said.append(message))
        assert found == [1, 4, 9, 16]
        assert sorted(said) == [(f"{job} on 1", 1) for job in (1, 2, 3, 4)]
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_captures_share_the_model_if_shared_memory_has_room(tiny_config, tmp_path, monkeypatch):
    """A model of more tensors than a process may be sent descriptors, 252."""
    model_and_text(tmp_path, tiny_config(vocab_size=4096, num_hidden_layers=30), 1)
    original, shared, made = waves.run_jobs, [], []
    monkeypatch.setattr(waves, "run_jobs", lambda *given, **how: shared.append(given[2]) or original(*given, **how))
    for number, room in enumerate((1e12, 0.0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, room=room: SimpleNamespace(free=room))
        source = waves.Source("train", tmp_path / str(number), [torch.arange(32)] * 2, 2, SHAPE, "weights", "cpu")
        waves.make_all(str(tmp_path / "model"), [(source, [0, 1])], 2, lambda *message: None)
        assert source.lacking([0, 1]) == []
        made.append([load_file(source.stored.file(n)) for n in range(2)])
    waves.loaded.cache_clear()
    assert shared == [2, 1]  # workers: each would need its own copy of the model
    for one, other in zip(*made, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_each_worker_has_a_device_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(device, "require_compiler", lambda: None)
    for number, own in enumerate(("cuda:0", "cuda:1", "cuda:0")):
        monkeypatch.setattr(device, "worker", number)
        assert (str(here("cuda")), str(here("cuda:1")), str(here("cpu"))) == (own, "cuda:1", "cpu")
    for wanted in ("cuda:2", f"cuda:{10**30}"):
        with pytest.raises(ValueError, match=f"{wanted} does not exist: this machine has 2 CUDA devices, cuda:0"):
            device_for(wanted, 0)
    assert workers.default_workers("cuda") == 2
    assert workers.default_workers("cuda:1") == 1


def test_an_error_or_a_killed_worker_stops_the_others_and_is_one_sentence(monkeypatch):
    monkeypatch.setattr(workers, "PRELOADED", (workers.__name__,))  # these jobs need no more
    began = time.monotonic()
    with pytest.raises(FloatingPointError, match="job 2 diverged"):
        run_jobs(fail, [1, 2], 2, print)
    assert time.monotonic() - began < 50
    with pytest.raises(ChildProcessError, match=r"a worker was killed, perhaps for lack of memory; run again with"):
        run_jobs(die, [1, 2], 2, print)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_process_that_started_them(how):
    code = "from hashtrain.run import workers; from worker_jobs import linger\n"
    code += "if __name__ == '__main__':\n"
    code += "    workers.PRELOADED = (workers.__name__,)\n"  # this job needs no more
    code += "    workers.run_jobs(linger, [1, 2], 2, lambda pid: print(pid, flush=True))"
    here = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    pids = set()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=here) as process:
        while len(pids) < 2:
            pids.add(int(process.stdout.readline()))
        process.send_signal(how)
    deadline = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().split()[2] != "Z"
