"""Training a layer: it learns, it repeats itself exactly, and it stops on a loss that is no number."""

from dataclasses import replace

import pytest
import torch
from hashtrain import HasherConfig, ModelShape, TrainConfig, train_layer
from hashtrain.layers import BY_VARIANT
from hashtrain.metrics import hash_quality

SHAPE = ModelShape(2, 4, 2, 32)


class Skewed:
    """Queries and keys in two narrow cones, as in real models: random hyperplanes tell them apart badly."""

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


def layer_of(variant, init="rotation"):
    config = HasherConfig(variant, SHAPE, bits=64, hidden=64, init=init)
    return BY_VARIANT[variant](config, torch.Generator().manual_seed(0))


def iou(layer, data):
    q, k, scaling = data.contexts[-1]  # never trained on
    rows = torch.arange(200, 400, 5)
    return hash_quality(layer, q[:, :, rows], k, rows, 0.05, scaling).iou.mean().item()


SETTINGS = TrainConfig(fraction=0.05, steps=60, rows=16, max_top=8, max_rest=32, min_position=50, learning_rate=5e-3)


@pytest.mark.parametrize(("variant", "init"), [("planes", "rotation"), ("paper", "rotation"), ("paper", "random")])
def test_training_raises_iou_on_rows_it_never_saw(variant, init):
    data, layer = Skewed(), layer_of(variant, init)
    before = iou(layer, data)
    losses = train_layer(layer, 0, data, SETTINGS)
    assert len(losses) == 60
    assert sum(losses[-10:]) < sum(losses[:10])
    assert iou(layer, data) > before + 0.05


@pytest.mark.parametrize("variant", ["linear", "group-xnor", "down-proj"])
def test_the_other_variants_learn(variant):
    data, layer = Skewed(), layer_of(variant)
    before = iou(layer, data)
    train_layer(layer, 0, data, SETTINGS)
    assert iou(layer, data) > before + 0.02


@pytest.mark.parametrize("variant", ["planes", "paper"])
def test_reconstruction_learns_too(variant):
    data, layer = Skewed(), layer_of(variant)
    losses = train_layer(layer, 0, data, replace(SETTINGS, loss="reconstruction"))
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert 0 <= min(losses) <= max(losses) <= 1


def test_the_same_seed_trains_the_same_bits():
    def trained(seed):
        layer = layer_of("planes")
        train_layer(layer, 0, Skewed(), TrainConfig(steps=3, rows=4, min_position=50, seed=seed))
        return layer.state_dict()

    first, again, other = trained(1), trained(1), trained(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_loss_that_is_no_number_stops_the_layer():
    data = Skewed()
    data.contexts[1] = (data.contexts[1][0] * torch.nan, *data.contexts[1][1:])
    with pytest.raises((FloatingPointError, ValueError), match=r"finite|nan"):
        train_layer(layer_of("paper"), 0, data, SETTINGS)


def test_learning_rate_rises_then_falls_to_zero():
    config = TrainConfig(steps=100, learning_rate=1.0, warmup=0.1)
    rates = [config.learning_rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] < 0.001
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(
    "changes", [{"fraction": 0}, {"fraction": 1.1}, {"steps": 0}, {"learning_rate": 0}, {"loss": "mse"}]
)
def test_impossible_settings_are_refused(changes):
    with pytest.raises(ValueError, match="must be"):
        TrainConfig(**changes)
