"""Training on a simulated CUDA device: fake tensors know their device, and reject mixed devices."""

import sys

import pytest
import torch
from hashtrain.artefact.hasher import make_layer
from hashtrain.cli import main
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.evaluation.evaluate import bit_statistics
from hashtrain.run import prepare
from hashtrain_runs import command
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode


@pytest.mark.parametrize("variant", ["lsh", "planes"])
def test_bits_of_keys_on_the_host_are_counted_on_the_device(variant):
    with FakeTensorMode():
        with torch.device("cuda"):
            hasher = make_layer(HasherConfig(variant, ModelShape(1, 4, 2, 64)), 0, None)
        with pytest.raises(DataDependentOutputException):  # it reached the first read of a value
            bit_statistics(hasher, torch.empty(1, 2, 100, 64))


def test_a_missing_compiler_is_a_sentence_before_the_model_is_read(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(prepare, "loaded", lambda *_: pytest.fail("the model was read"))
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    assert main([*command(folder, tmp_path / "run"), "--device", "auto"]) == 2
    said = capsys.readouterr().err
    assert "hashcore needs cuda-core to compile its CUDA kernels, and it is not installed" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
