"""Training on a CUDA device that is not there: tensors of two devices never meet, and waits are counted."""

import pytest
import torch
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.hasher import make_layer
from hashtrain.layers import BY_VARIANT
from hashtrain.remainder import calibrate
from hashtrain.trainer import TrainConfig, Training
from pretend_gpu import MixedDevices, Pretended, pretend_gpu

WAITS = 1  # of a step: the loss and the norm of its gradient, at its end


def test_tensors_of_two_devices_are_refused():
    with pretend_gpu():
        there, here = torch.zeros(3, device="cuda"), torch.zeros(3)
        with pytest.raises(MixedDevices, match="add got tensors of two devices"):
            there + here
        assert (there + 1).device.type == "cuda"


def test_a_generator_of_another_device_is_refused():
    with pretend_gpu(), pytest.raises(MixedDevices, match="draws on one device with the generator of another"):
        torch.rand(3, device="cuda", generator=torch.Generator("cpu"))


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
    """Repairing makes layers inside the device's context, which refuses a generator of the host."""
    config = HasherConfig("transform", ModelShape(2, 4, 2, 32))
    with pretend_gpu(), torch.device("cuda"):
        layer = make_layer(config, 0, 0)
    assert all(x.device.type == "cpu" for x in layer.state_dict().values())
