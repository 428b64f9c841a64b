"""Heads of `transform` get other weights where they select better, and only there."""

import pytest
import torch
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.evaluation.metrics import Quality, fails
from hashtrain.hasher import make_layer
from hashtrain.training import choose as module
from hashtrain.training.choose import choose
from hashtrain_runs import Whole

SHAPE = ModelShape(1, 4, 2, 16)
CONFIG = HasherConfig("transform", SHAPE, bits=96, hidden=8)
LOST = torch.cat([torch.full((99,), 0.99), torch.full((1,), 0.1)])
GOOD = torch.full((100,), 0.9)


class Captured(Whole):
    """Contexts whose keys vary mostly in a few directions."""

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        spread = torch.logspace(1, -2, 16)
        self.k = torch.randn(3, 2, 300, 16, generator=draw) * spread
        self.q = torch.randn(3, 4, 300, 16, generator=draw)

    def __len__(self):
        return 3

    def read(self, context, layer):
        return self.q[context : context + 1], self.k[context : context + 1], 0.5


def started(data):
    layer = make_layer(CONFIG, 0, 0)
    layer.start(data, 0, 5)
    return layer


@pytest.mark.parametrize("part", ["key", "query"])
def test_a_head_that_training_spoiled_gets_what_measures_best_and_the_other_keeps_its_own(part):
    data = Captured()
    layer, other = started(data), started(data)
    weights = getattr(layer, part).r
    own = weights[: len(weights) // 2].clone()
    with torch.no_grad():
        weights[len(weights) // 2 :] = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    found = choose(layer, {"start": other}, 0, data, 0.3)
    assert found == {1: "start"}
    assert all(torch.equal(x, y) for x, y in zip(layer.state_dict().values(), other.state_dict().values(), strict=True))
    assert torch.equal(getattr(layer, part).r[: len(own)], own)


def test_a_head_fails_by_its_worst_rows():
    assert not fails(torch.full((1000,), 0.7))
    assert fails(torch.cat([torch.full((940,), 0.99), torch.full((60,), 0.55)]))  # 5th percentile
    assert fails(torch.cat([torch.full((997,), 0.99), torch.full((3,), 0.4)]))  # three rows in a thousand are lost


def test_what_does_not_fail_beats_a_better_mean(monkeypatch):
    """Masses are invented, in the order in which hashers are measured."""
    masses = [[LOST, LOST], [GOOD, LOST * 0.9], [GOOD * 0.9, LOST * 0.91]]
    found = [Quality(torch.empty(0), torch.empty(0), torch.stack(of)) for of in masses]
    monkeypatch.setattr(module, "layer_quality", lambda *_: found)
    layer, *others = (started(Captured()) for _ in masses)
    assert choose(layer, dict(zip("ab", others, strict=True)), 0, Captured(), 0.3) == {0: "a"}
