"""The kernels that are compiled beside the captures."""

import numba
import pytest
import torch
from hashcore.cpu import threads
from hashtrain import HasherConfig, ModelShape, TrainConfig, train_layer
from hashtrain.artefact.hasher import make_layer
from hashtrain.cli import main
from hashtrain.evaluation.metrics import hash_quality
from hashtrain.evaluation.remainder import calibrate
from hashtrain.run import pipeline
from hashtrain.run.kernels import compile_kernels
from hashtrain.training import pair_loss
from hashtrain_runs import command

SHAPE = ModelShape(2, 4, 2, 32)


@pytest.fixture
def compiled_for(monkeypatch):
    """The kernels that were run, each with the types of its arguments."""
    found, compiled = set(), threads.compiled

    def recording(kernel):
        def call(*arguments):
            found.add((kernel.__qualname__, *map(numba.typeof, arguments)))
            return compiled(kernel)(*arguments)

        return call

    for module in (threads, pair_loss):
        monkeypatch.setattr(module, "compiled", recording)
    return found


def test_training_needs_no_other_kernels_and_no_other_types(data, compiled_for):
    compile_kernels()
    before = set(compiled_for)
    compiled_for.clear()
    for variant in ("lsh", "paper", "transform"):
        layer = make_layer(HasherConfig(variant, SHAPE, hidden=64), 0)
        if variant != "lsh":
            train_layer(layer, 0, data, TrainConfig(steps=1, rows=16, min_position=64))
        calibrate(layer, 0, data)
        q, k, scaling = data.read(0, 0)
        for per_query_head in (False, True):
            hash_quality(layer, q, k, torch.arange(q.shape[2]), 0.02, scaling, per_query_head)
    assert compiled_for == before


def test_an_error_of_the_compilation_beside_the_captures_is_raised(folder, tmp_path, monkeypatch):
    def fails():
        raise RuntimeError("no compiler")

    monkeypatch.setattr(pipeline, "compile_kernels", fails)
    with pytest.raises(RuntimeError, match="no compiler"):
        main(command(folder, tmp_path, "--workers", "2", "--only", "lsh"))
