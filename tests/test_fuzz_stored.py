"""Damaged and lying indexes, captures and checkpoints: the law stands in fuzz_damage.py."""

import numpy as np
import pytest
import torch
from fuzz_damage import LAW, SHAPE, damaged, found, little_memory
from hashcore import BitIndex
from hashtrain import HasherConfig
from hashtrain.artefact.hasher import make_layer
from hashtrain.data.capture import Capture
from hashtrain.data.captured import KEY
from hashtrain.training.checkpoint import load_stored, save_stored
from hashtrain.training.train_config import TrainConfig
from hashtrain.training.trainer import Training
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

# The index.


@pytest.fixture(scope="module")
def index(folder):
    made = BitIndex.from_vectors(np.random.default_rng(0).normal(size=(9, 32)).astype(np.float32), keep="float16")
    made.save(folder / "index")
    return made, (folder / "index").read_bytes()


@LAW
@given(st.data(), st.booleans())
def test_a_damaged_index_is_refused_or_harmless(folder, index, data, mapped):
    made, content = index
    path = folder / "damaged.index"
    path.write_bytes(data.draw(damaged(content)))
    read = found(lambda: BitIndex.load(path, mmap=mapped), path.name)
    assert read is None or (read.codes.tolist(), read.ids.tolist()) == (made.codes.tolist(), made.ids.tolist())


# Captures.


@pytest.fixture
def captured(folder):
    """A capture of one context."""
    stored, generator = Capture(folder / "capture", 1), torch.Generator().manual_seed(0)
    tensors = {f"{name}.0": torch.randn(1, heads, 4, 8, generator=generator) for name, heads in (("q", 2), ("k", 1))}
    stored.folder.mkdir(exist_ok=True)
    save_file(tensors, stored.file(0), metadata={"scaling.0": "0.5", KEY: "key"})
    assert stored.holds(0, "key")
    return stored


@settings(LAW, suppress_health_check=[HealthCheck.function_scoped_fixture, *LAW.suppress_health_check])
@given(st.data())
def test_a_damaged_capture_is_missed_or_read_whole(captured, data):
    content = captured.file(0).read_bytes()
    captured.file(0).write_bytes(data.draw(damaged(content)))
    with little_memory():
        held = captured.holds(0, "key")
    if held and found(lambda: captured.keys(0, 0), "00000.safetensors") is not None:
        assert len(captured.file(0).read_bytes()) == len(content)
    captured.file(0).write_bytes(content)


# Checkpoints.


TRAINING = TrainConfig(steps=20)


@pytest.fixture(scope="module")
def checkpoint(folder):
    """The tensors and state of a training, and its file's bytes."""
    training = Training(
        make_layer(HasherConfig("planes", SHAPE, bits=32, hidden=4), 0), 0, Capture(folder, 1), TRAINING
    )
    loss = sum(parameter.square().sum() for parameter in training.hasher.parameters())
    loss.backward()
    training.optimizer.step()
    training.losses = [1.0]
    save_stored(folder / "checkpoint", *training._state())
    return training._state(), (folder / "checkpoint").read_bytes()


@LAW
@given(st.data())
def test_no_damage_to_a_checkpoint_goes_unseen(folder, checkpoint, data):
    (tensors, state), content = checkpoint
    path = folder / "damaged.checkpoint"
    path.write_bytes(data.draw(damaged(content)))
    read = found(lambda: load_stored(path), path.name)
    assert read is None or (
        read[1] == state and all(torch.equal(read[0][name], tensor) for name, tensor in tensors.items())
    )
