"""Heads of `transform` are replaced where something selects better, and only there."""

import sys

import torch
from hashtrain.artefact.hasher import make_layer
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.evaluation.evaluate import fails
from hashtrain.layers.transform import Transform
from hashtrain.run.repair import repair
from hashtrain_runs import Whole

SHAPE = ModelShape(1, 4, 2, 16)
CONFIG = HasherConfig("transform", SHAPE, bits=96, hidden=8)


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


def spoiled(head):
    data, layer = Captured(), make_layer(CONFIG, 0, 0)
    layer.start(data, 0, 5)
    with torch.no_grad():
        layer.key.r[head] = torch.randn(layer.key.r[head].shape, generator=torch.Generator().manual_seed(1))
    return data, layer


def test_a_head_that_training_spoiled_gets_its_start_back_and_the_other_keeps_its_own():
    data, layer = spoiled(1)
    own = layer.key.r[0].clone()
    with torch.no_grad():
        layer.key.b2[0] += 1e-6  # trained, neither better nor worse than its start
    bias = layer.key.b2[0].clone()
    found, _ = repair(layer, 0, data, CONFIG, 0, 5, 0.3)
    assert found[1].startswith("start of")
    fresh = make_layer(CONFIG, 0, 0)
    fresh.start(data, 0, int(found[1].split()[2]))
    assert torch.equal(layer.key.r[1], fresh.key.r[1])
    assert torch.equal(layer.query.r[2:], fresh.query.r[2:])
    assert torch.equal(layer.key.r[0], own)
    assert 0 in found or torch.equal(layer.key.b2[0], bias)


def test_a_head_that_lost_when_queries_were_trained_gets_back_the_keys_trained_before():
    data, layer = Captured(), make_layer(CONFIG, 0, 0)
    layer.start(data, 0, 5)
    other = make_layer(CONFIG, 0, 0)
    other.start(data, 0, 5)
    with torch.no_grad():
        layer.query.r[2:] = torch.randn(layer.query.r[2:].shape, generator=torch.Generator().manual_seed(1))
        other.key.b2 += 1e-6  # different from the start
    found = repair(layer, 0, data, CONFIG, 0, 5, 0.3, other.state_dict()).taken
    assert found[1] == "keys alone trained"
    assert torch.equal(layer.query.r[2:], other.query.r[2:])
    assert torch.equal(layer.key.b2[1], other.key.b2[1])


def test_other_variants_keep_what_they_have():
    assert repair(make_layer(HasherConfig("planes", SHAPE, bits=32), 0, 0), 0, Captured(), CONFIG, 0, 5, 0.1) == (
        {},
        [],
    )


def test_each_candidate_hashes_the_keys_of_a_context_once(monkeypatch):
    data, layer = Captured(), make_layer(CONFIG, 0, 0)
    layer.start(data, 0, 5)
    kept, hashed = {name: x.clone() for name, x in layer.state_dict().items()}, []

    def encode_keys(self, k, *more, own=Transform.encode_keys):
        hashed.append(k)
        return own(self, k, *more)

    monkeypatch.setattr(Transform, "encode_keys", encode_keys)
    found = repair(layer, 0, data, CONFIG, 0, 5, 0.3, kept)
    assert found.failing == [0, 1]
    assert len(hashed) == 7 * len(data)  # as it is, the keys alone trained, its start, and four starts of other digits


def test_a_head_fails_by_its_worst_rows():
    assert not fails(torch.full((1000,), 0.7))
    assert fails(torch.cat([torch.full((940,), 0.99), torch.full((60,), 0.55)]))  # 5th percentile
    assert fails(torch.cat([torch.full((997,), 0.99), torch.full((3,), 0.4)]))  # three rows in a thousand are lost


def invent(monkeypatch, masses):
    """Let hashers find these masses, in the order in which they are measured."""
    found = lambda hashers, *rest: [next(masses) for _ in hashers]  # noqa: E731
    monkeypatch.setattr(sys.modules[repair.__module__], "_masses", found)


def test_a_start_that_does_not_fail_beats_a_better_mean(monkeypatch):
    lost = torch.cat([torch.full((99,), 0.99), torch.full((1,), 0.1)])
    masses = iter([[lost, lost], [torch.full((100,), 0.9), lost * 0.9], *[[lost * 0.9] * 2] * 4])
    invent(monkeypatch, masses)
    data, layer = Captured(), make_layer(CONFIG, 0, 0)
    layer.start(data, 0, 5)
    found = repair(layer, 0, data, CONFIG, 0, 5, 0.3)
    assert found.taken == {0: "start of 5 digits"}
    assert found.failing == [1]  # what is left for the choice of dense layers


def test_a_failing_head_gets_the_best_of_what_fails_less_or_else_of_what_fails(monkeypatch):
    """Other numbers of digits are tried only for heads that still fail."""
    lost = torch.cat([torch.full((99,), 0.99), torch.full((1,), 0.1)])
    good = torch.full((100,), 0.9)
    tried = [[lost * 0.9] * 2, [lost * 0.91, lost], [lost * 0.92, lost], [good, lost], [good * 1.1, lost * 0.9]]
    masses = iter([*tried, [lost, lost * 0.9]])
    invent(monkeypatch, masses)
    data, layer = Captured(), make_layer(CONFIG, 0, 0)
    layer.start(data, 0, 5)
    found = repair(layer, 0, data, CONFIG, 0, 5, 0.3)
    assert found == ({0: "start of 6 digits", 1: "start of 5 digits"}, [1])
    assert not [*masses]
