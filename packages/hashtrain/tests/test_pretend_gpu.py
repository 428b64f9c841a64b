"""Runs on a simulated CUDA device: tensors on two devices never meet, and waits are counted.

This tests devices, copies, waits, and that a tensor sent ahead is not used too early. It does not test gradients, which
are zero here, CUDA's kernels, or speed.
"""

import json

import pytest
import torch
from hashtrain import Hasher
from hashtrain.artefact.hasher import make_layer
from hashtrain.cli import main
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.data.capture import run_context
from hashtrain.evaluation.remainder import calibrate
from hashtrain.layers import BY_VARIANT
from hashtrain.machine import distribute
from hashtrain.machine.transfer import Ahead
from hashtrain.training.train_config import TrainConfig
from hashtrain.training.trainer import Training
from hashtrain_runs import command
from pretend_gpu import CUDA, PROPERTIES, MixedDevices, Pretended, pretend_gpu

WAITS = 1  # per step: the loss and the norm of its gradient, at its end


def test_tensors_of_two_devices_are_refused():
    with pretend_gpu():
        there, here = torch.zeros(3, device="cuda"), torch.zeros(3)
        with pytest.raises(MixedDevices, match="add got tensors of two devices"):
            there + here
        assert (there + 1).device.type == "cuda"


def test_a_generator_of_another_device_is_refused():
    with pretend_gpu(), pytest.raises(MixedDevices, match="draws on one device with the generator of another"):
        torch.rand(3, device="cuda", generator=torch.Generator("cpu"))


def test_meta_tensors_stay_without_memory():
    """Models are created there before they are read; real memory would hold garbage where the file has no tensor."""
    with pretend_gpu(), torch.device("meta"):
        assert torch.zeros(3).is_meta


def test_waits_and_copies_are_listed():
    with pretend_gpu() as device:
        numbers = torch.arange(3).to("cuda")
        assert (numbers.sum().item(), numbers.tolist(), numbers.cpu().device.type) == (3, [0, 1, 2], "cpu")
    assert device.waits == ["_local_scalar_dense", "tolist"]
    assert device.copies == ["to", "from"]


@pytest.mark.parametrize("variant", BY_VARIANT)
def test_a_layer_is_started_trained_and_calibrated_there(variant, data):
    shape = ModelShape(2, 4, 2, 32)
    with pretend_gpu() as device:
        hasher = make_layer(HasherConfig(variant, shape), 0, 0).to("cuda")
        hasher.start(data, 0, 5)
        if any(p.requires_grad for p in hasher.parameters()):
            training = Training(hasher, 0, data, TrainConfig(steps=3, min_position=32, precision="bf16"))
            training.run(until=1)
            device.waits.clear()
            device.copies.clear()
            device.queued.clear()
            training.run()
            assert len(training.losses) == 3
            assert (len(device.waits), device.copies) == (2 * WAITS, [])
            assert set(device.queued) == {"to"}
        with torch.device("cuda"):
            calibrate(hasher, 0, data, 0)
        assert all(isinstance(x, Pretended) for x in hasher.state_dict().values())


def test_a_layer_is_drawn_in_host_memory_whatever_the_device():
    """Repairing creates layers inside the device's context, which rejects a generator of the host."""
    config = HasherConfig("transform", ModelShape(2, 4, 2, 32))
    with pretend_gpu(), torch.device("cuda"):
        layer = make_layer(config, 0, 0)
    assert all(x.device.type == "cpu" for x in layer.state_dict().values())


def test_what_is_sent_ahead_is_refused_until_the_stream_waits_for_it():
    with pretend_gpu() as device:
        ahead = Ahead(CUDA)
        sent = ahead.send(torch.arange(3))
        with pytest.raises(AssertionError, match="add got a tensor that another stream has not finished"):
            sent + 1
        assert (ahead.take(sent) + 1).tolist() == [1, 2, 3]
    assert (device.queued, device.copies) == (["to"], [])


def test_the_keys_of_the_next_step_are_sent_while_one_is_computed(data, monkeypatch):
    events = []
    send, take, gradients = Ahead.send, Ahead.take, Training._gradients
    monkeypatch.setattr(Ahead, "send", lambda own, x: events.append("send") or send(own, x))
    monkeypatch.setattr(Ahead, "take", lambda own, x: events.append("take") or take(own, x))
    monkeypatch.setattr(Training, "_gradients", lambda own, *at: events.append("compute") or gradients(own, *at))
    with pretend_gpu() as device:
        hasher = make_layer(HasherConfig("planes", ModelShape(2, 4, 2, 32)), 0, 0).to("cuda")
        training = Training(hasher, 0, data, TrainConfig(steps=4, min_position=32))
        training.run(until=3)
        training.run()
        assert len(device.waits) == 4 * WAITS
    assert events == ["compute", "send", "take", "compute", "send", "take", "compute", "compute"]


@pytest.fixture
def there(model):
    """The tiny model on the simulated device."""
    copied = type(model)(model.config).eval()
    copied.load_state_dict(model.state_dict())
    return copied


def test_a_context_leaves_the_device_in_queued_copies_with_one_wait(model, there):
    ids = torch.arange(97).repeat(6)[:512]
    wanted, _ = run_context(model, ids)
    with pretend_gpu() as device:
        there.to("cuda")
        device.waits.clear()
        device.copies.clear()
        found, _ = run_context(there, ids)
        # The other wait is transformers' own, at the start: whether the context is packed from several texts.
        assert device.waits == ["_local_scalar_dense", "synchronize"]
        assert (device.copies, device.queued) == (["to"], ["from"] * 6)  # its tokens; q, k and v of two layers
        assert not any(isinstance(x, Pretended) for x in found.values())
        for name, x in wanted.items():
            torch.testing.assert_close(found[name].float(), x.float(), atol=4e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "more"), [(("lsh", "paper"), ()), (("planes", "transform"), ()), (("paper",), ("--dry-run",))]
)
def test_a_whole_run_ends_well_there(only, more, folder, tmp_path, monkeypatch, capsys):
    """Capture, training, calibration, evaluation, costs, and hashers that load; layers of every variant are above."""
    monkeypatch.setattr(distribute, "require_compiler", lambda: None)
    with pretend_gpu() as device:
        words = ["--only", *only, "--device", "auto", "--bits", "32", *more]
        assert main([*command(folder, tmp_path / "run"), *words]) == 0
    assert device.launches
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    if "--dry-run" in more:
        assert last["dry_run"]["disk"] > 0
        return
    for name in only:
        state = Hasher.from_pretrained(tmp_path / "run" / name).state_dict()
        assert all(x.device.type == "cpu" for x in state.values())
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["device"] == PROPERTIES.name
