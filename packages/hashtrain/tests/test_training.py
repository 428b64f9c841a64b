"""Training a layer: it learns, is reproducible, stops on a bad loss, and keeps for each head what measures best."""

from dataclasses import replace

import pytest
import torch
from hashtrain import HasherConfig, ModelShape, TrainConfig, train_layer
from hashtrain.evaluation.metrics import Quality, fails, quality_of_scores
from hashtrain.hasher import make_layer
from hashtrain.layers import BY_VARIANT
from hashtrain.training import choose as module
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


@pytest.mark.parametrize(("variant", "gain"), [("planes", 0.05), ("paper", 0.05), ("linear", 0.02)])
def test_training_raises_iou_on_rows_it_never_saw(variant, gain):
    (data, held), layer = skewed(), layer_of(variant)
    before = iou(layer, held)
    losses = train_layer(layer, 0, data, SETTINGS)
    assert len(losses) == 60
    assert sum(losses[-10:]) < sum(losses[:10])
    assert iou(layer, held) > before + gain


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


def test_keys_alone_are_trained_first_and_what_they_were_then_is_kept():
    data, layer = skewed()[0], layer_of("transform")
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


@pytest.mark.sample(1)
@pytest.mark.parametrize(("risen", "share"), [(1.3, 1.0), (1.4, 0.1)])
def test_a_loss_that_rises_with_the_queries_slows_them_down(risen, share, tmp_path):
    """In steps 30 to 39, after the keys; the best interval is the second. A resumed training knows."""
    layer, kept, file = layer_of("transform"), {}, tmp_path / "layer.checkpoint"
    config = replace(SETTINGS, steps=60, keys_first=0.5, warmup=0.01)
    training = Training(layer, 0, skewed(6)[0], config, file, seconds=0)

    def pretend(step, loss):
        training.losses[-1] = 1.0 if step // 10 == 1 else risen if step >= 30 else 1.1
        if step == 19:
            kept.update({name: tensor.clone() for name, tensor in layer.state_dict().items()})

    training.run(pretend, until=40)
    assert training.query_share == share
    went_back = all(torch.equal(kept[name], tensor) for name, tensor in layer.state_dict().items())
    assert went_back == (share < 1)
    resumed = Training(layer_of("transform"), 0, skewed(6)[0], config, file)
    assert resumed.query_share == share
    resumed.run(until=41)
    keys, queries = (group["lr"] for group in resumed.optimizer.param_groups)
    assert queries == pytest.approx(share * keys)


@pytest.mark.parametrize(
    ("variant", "at"),
    [("transform", 31), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("planes", 1), ("paper", 37)))],
)
def test_a_training_cut_off_at_any_step_ends_with_the_same_bits(variant, at, tmp_path):
    data, whole, config = skewed()[0], layer_of(variant), replace(SETTINGS, keys_first=0.5 * (variant == "transform"))
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
    assert resumed.kept.keys() == training.kept.keys()
    for what, kept in training.kept.items():
        assert all(torch.equal(t, resumed.kept[what][name]) for name, t in kept.items())


CONFIG = HasherConfig("transform", ModelShape(1, 4, 2, 16), bits=96, hidden=8)
LOST = torch.cat([torch.full((98,), 0.99), torch.full((2,), 0.1)])
GOOD = torch.full((100,), 0.9)


def started(data):
    layer = make_layer(CONFIG, 0, 0)
    layer.start(data, 0, 5)
    return layer


@pytest.mark.parametrize("part", ["key", "query"])
def test_a_head_that_training_spoiled_gets_what_measures_best_and_the_other_keeps_its_own(part):
    data = captured()
    layer, other = started(data), started(data)
    weights = getattr(layer, part).r
    own = weights[: len(weights) // 2].clone()
    with torch.no_grad():
        weights[len(weights) // 2 :] = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    found = choose(layer, {"start": other}, 0, data, 0.3)
    assert found == {1: "start"}
    assert all(torch.equal(x, y) for x, y in zip(layer.state_dict().values(), other.state_dict().values(), strict=True))
    assert torch.equal(getattr(layer, part).r[: len(own)], own)


def test_what_does_not_fail_beats_a_better_mean(monkeypatch):
    """Masses are invented, in the order in which hashers are measured."""
    masses = [[LOST, LOST], [GOOD, LOST * 0.9], [GOOD * 0.9, LOST * 0.91]]
    found = [Quality(torch.empty(0), torch.empty(0), torch.stack(of)) for of in masses]
    monkeypatch.setattr(module, "layer_quality", lambda *_: found)
    layer, *others = (started(captured()) for _ in masses)
    assert choose(layer, dict(zip("ab", others, strict=True)), 0, captured(), 0.3) == {0: "a"}
    assert not fails(LOST[:-1])  # of so few rows, one says nothing
