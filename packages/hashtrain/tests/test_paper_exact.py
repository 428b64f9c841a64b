"""`paper-exact` against the paper's formula, the effect of flags, and the settings stored in the artefact."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape, TrainConfig
from hashtrain.cli import main
from hashtrain.hasher import make_layer
from hashtrain.training.target import attention, sample_pairs
from hashtrain.training.trainer import Training
from hashtrain_runs import Whole, command

SHAPE = ModelShape(1, 4, 2, 16)
T, FRACTION = 100, 0.05
PAPER = TrainConfig(fraction=FRACTION, of="length", sink=0, recent=0, min_position=0, steps=1, max_top=4, max_rest=30)


class Drawn(Whole):
    """Random queries and keys, far enough apart for different scores."""

    def __len__(self):
        return 1

    def read(self, context, layer):
        generator = torch.Generator().manual_seed(1)
        return 2 * torch.randn(1, 4, T, 16, generator=generator), torch.randn(1, 2, T, 16, generator=generator), 0.25


def layer_of():
    config = HasherConfig("paper", SHAPE, bits=32, hidden=128, init="gaussian")
    layer = make_layer(config, 0, seed=3)
    for parameter in layer.parameters():
        parameter.data *= 100  # so that codes differ, as after the first steps of training
    return layer


def papers_loss(mlp, q, k, positions, top, rest, gamma, alpha, beta):
    """The paper's section 3.3 for one head, independent of our code: the loss of the pairs (top[r], rest).

    mlp: W1 [D, 128], b1 [128], W2 [128, bits]; q [R, D]; k [T, D]; top: token numbers [R][A]; rest: [C].
    """
    w1, b1, w2 = mlp

    def code(x):
        z = x @ w1 + b1
        y = (z * torch.sigmoid(z)) @ w2
        return gamma * y / (1 + gamma * y.abs())

    k_of_row = math.floor(T * FRACTION)  # of the full length, for every row
    losses = []
    for r, position in enumerate(positions.tolist()):
        order = (q[r] @ k[: position + 1].T).argsort(descending=True).tolist()
        target = set(order[:k_of_row])
        estimated = code(q[r]) @ code(k).T
        assert set(top[r]) <= target
        pairs = [(i, j) for i in top[r] for j in rest if j <= position and j not in target]
        losses += [-torch.sigmoid(beta * (estimated[i] - estimated[j]) - alpha).log() for i, j in pairs]
    return losses


@pytest.mark.parametrize(("alpha", "beta"), [(3.0, 1.0), (0.5, 0.25)])
def test_a_training_step_is_the_papers_formula(alpha, beta):
    layer, config = layer_of(), replace(PAPER, alpha=alpha, beta=beta)
    training = Training(layer, 0, Drawn(), config)
    pairs_of, drawn = training._pairs, []
    training._pairs = lambda *args: drawn.append(pairs_of(*args)) or drawn[-1]
    (q, k, scaling), at = training.data.read(0, 0), torch.tensor([0, 2, 9, 40, 77, 99])
    got = training._gradients(q[:, :, at], k, at, scaling)
    gradients = [p.grad.clone() for p in (layer.w1, layer.b1, layer.w2)]
    (pairs,) = drawn
    losses = []
    for head in range(4):
        mlp = layer.w1[head], layer.b1[head, 0], layer.w2[head]
        told = pairs.top[0, head].tolist(), pairs.rest.tolist()
        losses += papers_loss(mlp, q[0, head, at], k[0, head // 2], at, *told, 64.0, alpha, beta)
    wanted = torch.stack(losses).mean()
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(wanted, [layer.w1, layer.b1, layer.w2])
    assert max(g.abs().max().item() for g in expected) > 1e-3, "an empty comparison"
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_rows_that_see_no_more_than_the_target_have_no_pair():
    at = torch.tensor([0, 3, 4, 5, 60])
    q, k, scaling = Drawn().read(0, 0)
    p = attention(q[:, :, at], k, at, scaling, "query")
    pairs = sample_pairs(p.clone(), at, FRACTION, 50, 500, torch.Generator().manual_seed(0), "length", (0, 0))
    assert pairs.valid.flatten(0, 1).any(-1).any(0).tolist() == [False, False, False, True, True]
    assert (pairs.top <= at[:, None]).all()  # only visible tokens


def test_the_gaussian_start_is_normal_and_for_the_paper_alone():
    config = HasherConfig("paper", ModelShape(1, 8, 8, 64), hidden=128, init="gaussian")
    layer = make_layer(config, 0)
    for tensor in (layer.w1, layer.b1, layer.w2):
        assert tensor.std().item() == pytest.approx(1e-3, rel=0.06)
        assert tensor.mean().abs().item() < 2e-4
    with pytest.raises(ValueError, match="gaussian requires variant paper, got planes"):
        HasherConfig("planes", SHAPE, init="gaussian")


def test_a_run_records_what_it_trained_with(folder, tmp_path, capsys):
    assert main(command(folder, tmp_path, "--only", "paper-exact", "paper-exact-untrained")) == 0
    capsys.readouterr()
    config = Hasher.from_pretrained(tmp_path / "paper-exact").config
    told = {"alpha": 3, "beta": 1, "max_top": 8, "max_rest": 512, "of": "length", "sink": 0, "min_position": 0}
    assert config.training.items() >= {**told, "recent": 0, "loss": "ranking", "steps": 2, "contexts": 2}.items()
    assert (config.init, config.hidden, config.residual) == ("gaussian", 128, False)
    untrained = json.loads((tmp_path / "paper-exact-untrained" / "config.json").read_text())
    assert untrained["training"] == {}
