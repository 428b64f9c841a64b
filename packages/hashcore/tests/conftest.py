"""Shared fixtures; puts this folder and the benchmarks' on the path, so that tests can import helper modules."""

import sys
from pathlib import Path
from types import SimpleNamespace

import hashcore
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from hashcore_samples import tensor


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture
def on_device(monkeypatch):
    """Sends every call with a tensor down the CUDA path, with the host simulator as the device."""
    device = pytest.importorskip("simulated", reason="g++ is needed").Device()
    from hashcore import torch_ops

    made = {name: torch_ops.on_cuda(name) for name in torch_ops.OPERATIONS}
    monkeypatch.setattr(torch_ops, "OPERATORS", SimpleNamespace(**made))
    monkeypatch.setattr("hashcore.cuda.launch.run", device)
    monkeypatch.setattr("hashcore.arguments.for_torch", lambda arguments: any(map(has_tensor, arguments)))
    return device


def has_tensor(x) -> bool:
    return type(x).__name__ == "Tensor"


class Backend:
    """Calls a function of hashcore on arrays, or on tensors of the same numbers in memory as the backend needs."""

    def __init__(self, name: str, device=None):
        self.name, self.device = name, device

    @property
    def kernels(self):
        return self.device.kernels if self.device else []

    def __call__(self, function: str, *given, **options):
        if self.name == "numpy":
            return getattr(hashcore, function)(*given, **options)
        return getattr(hashcore, function)(*map(tensor, given), **{name: tensor(x) for name, x in options.items()})


@pytest.fixture(params=["numpy", "torch", "operators", "simulated"])
def backend(request, monkeypatch):
    """Every way through hashcore: arrays, tensors as arrays, torch operators on the CPU, CUDA's under the simulator."""
    if request.param == "simulated":
        return Backend(request.param, request.getfixturevalue("on_device"))
    if request.param == "operators":
        pytest.importorskip("torch", reason="torch is an optional extra of hashcore")
        monkeypatch.setattr("hashcore.arguments.for_torch", lambda arguments: any(map(has_tensor, arguments)))
    return Backend(request.param)
