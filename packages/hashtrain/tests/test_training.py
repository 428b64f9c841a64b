"""Training a layer: it learns, is reproducible, and stops on a loss that is not finite."""

from dataclasses import replace

import pytest
import torch
from hashtrain import HasherConfig, ModelShape, TrainConfig, train_layer
from hashtrain.evaluation.metrics import hash_quality
from hashtrain.layers import BY_VARIANT
from hashtrain.training.checkpoint import Checkpoint
from hashtrain.training.trainer import Training
from hashtrain_runs import Whole

SHAPE = ModelShape(2, 4, 2, 32)


class Skewed(Whole):
    """Queries and keys in two narrow cones, as in real models; random hyperplanes separate them badly."""

    def __init__(self, count=4, t=400):
        generator = torch.Generator().manual_seed(0)
        draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
        axis_q, axis_k, few = draw(1, 4, 1, 32) * 4, draw(1, 2, 1, 32) * 4, draw(6, 32)
        self.contexts = [
            (axis_q + draw(1, 4, t, 6) @ few, axis_k + draw(1, 2, t, 6) @ few, 32**-0.5) for _ in range(count)
        ]

    def __len__(self):
        return len(self.contexts) - 1

    def read(self, context, layer):
        return self.contexts[context]


def layer_of(variant):
    config = HasherConfig(variant, SHAPE, bits=64, hidden=64)
    return BY_VARIANT[variant](config, torch.Generator().manual_seed(0))


def iou(layer, data):
    q, k, scaling = data.contexts[-1]  # never trained on
    rows = torch.arange(200, 400, 5)
    return hash_quality(layer, q[:, :, rows], k, rows, 0.05, scaling).iou.mean().item()


SETTINGS = TrainConfig(fraction=0.05, steps=60, rows=16, max_top=8, max_rest=32, min_position=50, learning_rate=5e-3)


@pytest.mark.parametrize(("variant", "gain"), [("planes", 0.05), ("paper", 0.05), ("linear", 0.02)])
def test_training_raises_iou_on_rows_it_never_saw(variant, gain):
    data, layer = Skewed(), layer_of(variant)
    before = iou(layer, data)
    losses = train_layer(layer, 0, data, SETTINGS)
    assert len(losses) == 60
    assert sum(losses[-10:]) < sum(losses[:10])
    assert iou(layer, data) > before + gain


def test_keys_alone_are_trained_first_and_what_they_were_then_is_kept():
    data, layer = Skewed(), layer_of("transform")
    layer.start(data, 0)
    start = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    training = Training(layer, 0, data, replace(SETTINGS, steps=20, keys_first=0.5))
    training.run(until=10)
    now = layer.state_dict()
    assert all(torch.equal(now[name], start[name]) for name in now if name.startswith("query."))
    assert not torch.equal(now["key.r"], start["key.r"])
    after_keys = {name: tensor.clone() for name, tensor in now.items()}
    training.run(until=15)  # at the end of an interval it may go back
    assert not torch.equal(layer.state_dict()["query.r"], start["query.r"])
    assert all(torch.equal(training.kept["keys"][name], after_keys[name]) for name in after_keys)


def poisoned(at):
    """Contexts of which one, first read at that step, holds NaN."""
    data = Skewed()
    q, k, scaling = data.contexts[at]
    data.contexts[at] = (q * torch.nan, k, scaling)
    return data


@pytest.mark.parametrize("variant", ["paper", "planes"])
def test_a_loss_that_is_not_finite_stops_the_layer_and_the_start_is_kept(variant, caplog):
    layer, start = layer_of(variant), layer_of(variant).state_dict()
    losses = train_layer(layer, 0, poisoned(2), SETTINGS)
    assert len(losses) == 2
    assert "layer 0 stopped at step 2 of 60" in caplog.text
    assert all(torch.equal(start[name], tensor) for name, tensor in layer.state_dict().items())


def test_a_diverging_loss_stops_the_layer_and_the_best_interval_is_kept():
    layer, kept = layer_of("paper"), {}
    training = Training(layer, 0, Skewed(), SETTINGS)

    def pretend(step, loss):
        training.losses[-1] = 1.0 if step < 10 else 0.5 if step < 20 else 3.9 if step < 30 else 4.1
        if step == 19:  # the end of the second interval of ten
            kept.update({name: tensor.clone() for name, tensor in layer.state_dict().items()})

    training.run(pretend)
    assert training.stopped == ("stopped at step 39 of 60: its mean loss rose from 1 to 4.1; its best weights are kept")
    assert all(torch.equal(kept[name], tensor) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize(("risen", "share"), [(1.3, 1.0), (1.4, 0.1)])
def test_a_loss_that_rises_with_the_queries_slows_them_down(risen, share, tmp_path):
    """In steps 30 to 39, after the keys; the best interval is the second. A resumed training knows."""
    layer, kept, file = layer_of("transform"), {}, Checkpoint(tmp_path / "layer.checkpoint", seconds=0)
    config = replace(SETTINGS, steps=60, keys_first=0.5, warmup=0.01)
    training = Training(layer, 0, Skewed(), config, file)

    def pretend(step, loss):
        training.losses[-1] = 1.0 if step // 10 == 1 else risen if step >= 30 else 1.1
        if step == 19:
            kept.update({name: tensor.clone() for name, tensor in layer.state_dict().items()})

    training.run(pretend, until=40)
    assert training.query_share == share
    went_back = all(torch.equal(kept[name], tensor) for name, tensor in layer.state_dict().items())
    assert went_back == (share < 1)
    resumed = Training(layer_of("transform"), 0, Skewed(), config, file)
    assert resumed.query_share == share
    resumed.run(until=41)
    keys, queries = (group["lr"] for group in resumed.optimizer.param_groups)
    assert queries == pytest.approx(share * keys)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("variant", "at"), [("planes", 1), ("planes", 37), ("paper", 20), ("transform", 30), ("transform", 31)]
)
def test_a_training_cut_off_at_any_step_ends_with_the_same_bits(variant, at, tmp_path):
    data, whole, config = Skewed(), layer_of(variant), replace(SETTINGS, keys_first=0.5 * (variant == "transform"))
    training = Training(whole, 0, data, config)
    training.run()
    file = Checkpoint(tmp_path / "layer.checkpoint", seconds=0)
    cut = layer_of(variant)

    def kill(step, loss):
        if step == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_layer(cut, 0, data, config, kill, file)
    resumed = Training(layer_of(variant), 0, data, config, file)
    assert len(resumed.losses) == at
    resumed.run()
    assert resumed.losses == training.losses
    assert all(torch.equal(t, resumed.hasher.state_dict()[name]) for name, t in whole.state_dict().items())
    assert resumed.kept.keys() == training.kept.keys()
    for what, kept in training.kept.items():
        assert all(torch.equal(t, resumed.kept[what][name]) for name, t in kept.items())


def test_learning_rate_rises_then_falls_to_zero():
    config = TrainConfig(steps=100, learning_rate=1.0, warmup=0.1)
    rates = [config.learning_rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] < 0.001
    assert rates[10:] == sorted(rates[10:], reverse=True)
    twice = replace(config, keys_first=0.25)
    rates = [twice.learning_rate_at(step) for step in range(100)]
    assert max(rates[:25]) == max(rates[25:]) == pytest.approx(1.0)
    assert max(rates[24], rates[99]) < 0.01
