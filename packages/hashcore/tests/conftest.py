"""Shared fixtures; puts this folder and the benchmarks' on the path, so that tests can import helper modules."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture
def on_device(monkeypatch):
    """Sends every call with a tensor down the CUDA path, with the host simulator as the device."""
    device = pytest.importorskip("simulated", reason="g++ is needed").Device()
    from hashcore import torch_ops

    made = {name: torch_ops.on_cuda(name) for name in torch_ops.OPERATIONS}
    written = {f"{name}_out": operation.cuda for name, operation in torch_ops.OPERATIONS.items()}
    monkeypatch.setattr(torch_ops, "OPERATORS", SimpleNamespace(**made, **written))
    monkeypatch.setattr("hashcore.cuda.launch.run", device)
    monkeypatch.setattr("hashcore.arguments.for_torch", lambda arguments: any(map(has_tensor, arguments)))
    return device


def has_tensor(x) -> bool:
    return type(x).__name__ == "Tensor" or (isinstance(x, tuple) and any(map(has_tensor, x)))


@pytest.fixture(params=["on the CPU", "on a device"])
def place(request):
    """Runs a test twice; the device, or None."""
    return request.getfixturevalue("on_device") if request.param == "on a device" else None
