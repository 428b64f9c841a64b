"""Training a layer: it learns, is reproducible, and stops on a bad loss."""

from dataclasses import replace

import pytest
import torch
from hashtrain import HasherConfig, ModelShape, TrainConfig, train_layer
from hashtrain.evaluation.metrics import fails, quality_of_scores
from hashtrain.hasher import make_layer
from hashtrain.layers import BY_VARIANT
from hashtrain.training import trainer
from hashtrain.training.choose import choose
from hashtrain.training.target import attention
from hashtrain.training.trainer import Training, interval_of
from hashtrain_runs import Given, captured

SHAPE = ModelShape(2, 4, 2, 32)


def skewed(count=4, t=400):
    """Queries and keys in two narrow cones, as in real models; random hyperplanes separate them badly.

    Returns: contexts to train on, and one more.
    """
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    axis_q, axis_k, few = draw(1, 4, 1, 32) * 4, draw(1, 2, 1, 32) * 4, draw(6, 32)
    drawn = [(axis_q + draw(1, 4, t, 6) @ few, axis_k + draw(1, 2, t, 6) @ few) for _ in range(count)]
    q, k = (torch.cat(x) for x in zip(*drawn, strict=True))
    return Given(q[:-1], k[:-1], 32**-0.5), Given(q[-1:], k[-1:], 32**-0.5)


def layer_of(variant):
    config = HasherConfig(variant, SHAPE, bits=64, hidden=64)
    return BY_VARIANT[variant](config, torch.Generator().manual_seed(0))


def iou(layer, held):
    rows = torch.arange(200, 400, 5)
    q = held.q[:, :, rows]
    p = attention(q, held.k, rows, held.scaling)
    return quality_of_scores(layer.scores(q, held.k), p, rows, 0.05).iou.mean().item()


ROWS = torch.arange(60, 400, 10)
SETTINGS = TrainConfig(fraction=0.05, steps=60, rows=16, max_top=8, max_rest=32, min_position=50, learning_rate=5e-3)


@pytest.mark.parametrize(
    ("variant", "gain"), [("planes", 0.05), ("paper", 0.05), ("linear", 0.02), ("transform", 0.01)]
)
def test_training_raises_iou_on_rows_it_never_saw(variant, gain):
    (data, held), layer = skewed(), layer_of(variant)
    before, start = iou(layer, held), {name: tensor.clone() for name, tensor in layer.named_parameters()}
    losses = train_layer(layer, 0, data, SETTINGS)
    assert len(losses) == 60
    assert sum(losses[-10:]) < sum(losses[:10])
    assert iou(layer, held) > before + gain
    assert not any(torch.equal(start[name], tensor) for name, tensor in layer.named_parameters())


@pytest.mark.parametrize("heads", ["kv", "query"])
def test_tokens_drawn_by_attention_are_weighed_by_probabilities(heads, monkeypatch):
    seen, data, layer = [], skewed()[0], layer_of("paper")
    q, k, _ = data.read(0, 0)
    monkeypatch.setattr(layer, "target_heads", heads)
    draw = trainer.sample_pairs
    monkeypatch.setattr(trainer, "sample_pairs", lambda p, *more: seen.append(p.clone()) or draw(p, *more))
    Training(layer, 0, data, replace(SETTINGS, steps=1, by_attention=True))._pairs(q[:, :, ROWS], k, ROWS, 0.2)
    torch.testing.assert_close(
        seen[0].clamp(min=0).sum(-1), torch.full(seen[0].shape[:-1], 2.0 if heads == "kv" else 1.0)
    )


def test_a_loss_that_is_not_finite_stops_the_layer_and_the_start_is_kept(caplog):
    data, layer, start = skewed()[0], layer_of("paper"), layer_of("paper").state_dict()
    data.q[2] = torch.nan  # which is first read in step 2
    assert len(train_layer(layer, 0, data, SETTINGS)) == 2
    assert "layer 0 stopped at step 2 of 60" in caplog.text
    assert all(torch.equal(start[name], tensor) for name, tensor in layer.state_dict().items())


def test_a_diverging_loss_stops_the_layer_and_the_best_interval_is_kept():
    layer, kept = layer_of("paper"), {}
    training = Training(layer, 0, skewed(6)[0], SETTINGS)

    def pretend(step, loss):
        training.losses[-1] = 1.0 if step < 10 else 0.5 if step < 20 else 3.9 if step < 30 else 4.1
        if step == 19:  # the end of the second interval of ten
            kept.update({name: tensor.clone() for name, tensor in layer.state_dict().items()})

    training.run(pretend)
    assert training.stopped == ("stopped at step 39 of 60: its mean loss rose from 1 to 4.1; its best weights are kept")
    assert all(torch.equal(kept[name], tensor) for name, tensor in layer.state_dict().items())


def test_losses_of_equal_contexts_are_compared():
    assert [interval_of(*x) for x in ((60, 3), (300, 20), (800, 40), (8192, 4096), (30, 40))] == [12, 20, 40, 204, 10]


@pytest.mark.parametrize(
    ("variant", "at"),
    [("transform", 31), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("planes", 1), ("paper", 37)))],
)
def test_a_training_cut_off_at_any_step_ends_with_the_same_bits(variant, at, tmp_path):
    data, whole, config = skewed()[0], layer_of(variant), SETTINGS
    training = Training(whole, 0, data, config)
    training.run()
    file = tmp_path / "layer.checkpoint"
    cut = layer_of(variant)

    def kill(step, loss):
        if step == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Training(cut, 0, data, config, file, seconds=0).run(kill)
    resumed = Training(layer_of(variant), 0, data, config, file)
    assert len(resumed.losses) == at
    resumed.run()
    assert resumed.losses == training.losses
    assert all(torch.equal(t, resumed.hasher.state_dict()[name]) for name, t in whole.state_dict().items())
    assert all(torch.equal(t, resumed.best[name]) for name, t in training.best.items())


def test_a_head_fails_by_at_least_two_rows():
    mass = torch.cat([torch.full((98,), 0.99), torch.full((2,), 0.1)])
    assert fails(mass)
    assert not fails(mass[:-1])  # of so few rows, one says nothing


@pytest.mark.parametrize("part", ["key", "query"])
def test_a_head_that_training_spoiled_keeps_its_start_and_the_other_its_training(part):
    config, data = HasherConfig("transform", ModelShape(1, 4, 2, 16), bits=96, hidden=8), captured()
    layer, start = (make_layer(config, 0, 0) for _ in range(2))
    for one in (layer, start):
        one.start(data, 0, 5)
    weights = getattr(layer, part).r
    own = weights[: len(weights) // 2].clone()
    with torch.no_grad():
        weights[len(weights) // 2 :] = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    assert choose(layer, start, 0, data, 0.3) == [1]
    assert all(torch.equal(x, y) for x, y in zip(layer.state_dict().values(), start.state_dict().values(), strict=True))
    assert torch.equal(getattr(layer, part).r[: len(own)], own)
