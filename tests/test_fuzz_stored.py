"""Damaged and lying indexes, captures and checkpoints: the law stands in fuzz_damage.py."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzz_damage import LAW, SHAPE, altered, damaged, found, hostile, little_memory
from hashcore import BitIndex
from hashtrain import HasherConfig
from hashtrain.artefact.hasher import make_layer
from hashtrain.data.capture import Capture
from hashtrain.data.manifest import begin, finish, missing
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


WANTED = {"format": 1, "contexts": 2}


@pytest.fixture
def captured(folder):
    """A whole capture of two contexts."""
    stored = Capture(folder / "capture", 2)
    begin(stored, WANTED)
    generator = torch.Generator().manual_seed(0)
    for number in range(2):
        tensors = {
            f"{name}.0": torch.randn(1, heads, 4, 8, generator=generator) for name, heads in (("q", 2), ("k", 1))
        }
        save_file(tensors, stored.file(number), metadata={"scaling.0": "0.5"})
        record = {"bytes": stored.file(number).stat().st_size}
        record["sha256"] = hashlib.sha256(stored.file(number).read_bytes()).hexdigest()
        stored.file(number).with_suffix(".json").write_text(json.dumps(record))
    finish(stored)
    assert missing(stored, WANTED) == []
    return stored


@settings(LAW, suppress_health_check=[HealthCheck.function_scoped_fixture, *LAW.suppress_health_check])
@given(st.data())
def test_a_manifest_that_lies_is_not_believed(captured, data):
    path = captured.folder / "manifest.json"
    whole = json.loads(path.read_text())
    text = data.draw(st.one_of(altered(whole), damaged(path.read_bytes())))
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    with little_memory():
        lacking = missing(captured, WANTED)
        begin(captured, WANTED)
    assert set(lacking) <= {0, 1}
    path.write_text(json.dumps(whole))
    begin(captured, WANTED)


@settings(LAW, suppress_health_check=[HealthCheck.function_scoped_fixture, *LAW.suppress_health_check])
@given(st.data())
def test_a_damaged_shard_is_missed_and_never_read_by_halves(captured, data):
    content = captured.file(0).read_bytes()
    changed = data.draw(damaged(content))
    captured.file(0).write_bytes(changed)
    assert missing(captured, WANTED) == [0] * (changed != content)
    read = found(lambda: captured.read(0, 0), "00000.safetensors")
    if read is not None:
        q, k, scaling = read
        assert (q.ndim, k.ndim, q.shape[-1]) == (4, 4, k.shape[-1])
        assert scaling - scaling == 0
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


class Sealed:
    """A checkpoint whose maker knows the format, and lies."""

    path = Path("sealed.checkpoint")

    def __init__(self, tensors, state):
        self.load = lambda: (tensors, state)


@LAW
@given(st.data())
def test_a_checkpoint_of_something_else_changes_nothing(folder, checkpoint, data):
    (tensors, state), _ = checkpoint
    tensors, state = dict(tensors), dict(state)
    for _ in range(data.draw(st.integers(1, 2))):
        if data.draw(st.integers(0, 3)) == 0:
            state[data.draw(st.sampled_from(sorted(state)))] = data.draw(hostile())
            continue
        name = data.draw(st.sampled_from(sorted(tensors)))
        strange = [torch.zeros(0), torch.zeros(3, 2), torch.tensor(1), torch.zeros(5056, dtype=torch.uint8), None]
        chosen = data.draw(st.sampled_from(strange))
        if chosen is None:
            del tensors[name]
        else:
            tensors[data.draw(st.sampled_from([name, f"{name}.more", "optimizer.x", "optimizer.7.step"]))] = chosen
    layer = make_layer(HasherConfig("planes", SHAPE, bits=32, hidden=4), 0, seed=9)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    read = found(lambda: Training(layer, 0, Capture(folder, 1), TRAINING, Sealed(tensors, state)), "sealed.checkpoint")
    if read is None:
        assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    else:
        assert all(torch.equal(tensors[f"hasher.{name}"], tensor) for name, tensor in layer.state_dict().items())
