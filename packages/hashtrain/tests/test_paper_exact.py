"""`paper-exact` against the paper's formula, the effect of flags, and the settings stored in the artefact."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape, TrainConfig
from hashtrain.artefact.hasher import make_layer
from hashtrain.cli import main, parse
from hashtrain.settings.recipes import ABLATIONS, ALL, EXACT
from hashtrain.settings.train_command import TrainCommand
from hashtrain.training.checkpoint import Checkpoint
from hashtrain.training.loss import squared_error
from hashtrain.training.target import attention, sample_pairs
from hashtrain.training.trainer import Training, _loss
from hashtrain.usage import UsageError
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


def layer_of(gamma=64.0, **changes):
    config = HasherConfig("paper", SHAPE, bits=32, hidden=128, init="gaussian", gamma=gamma, **changes)
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


@pytest.mark.parametrize(("gamma", "alpha", "beta"), [(64.0, 3.0, 1.0), (4.0, 0.5, 0.25)])
def test_a_training_step_is_the_papers_formula(gamma, alpha, beta):
    layer, config = layer_of(gamma), replace(PAPER, alpha=alpha, beta=beta)
    training = Training(layer, 0, Drawn(), config)
    pairs_of, drawn = training._pairs, []
    training._pairs = lambda *args: drawn.append(pairs_of(*args)) or drawn[-1]
    (q, k, scaling), at = training.data.read(0, 0), torch.tensor([0, 2, 9, 40, 77, 99])
    got = training._gradients(q[:, :, at], k, at, scaling)
    gradients = [p.grad.clone() for p in (layer.w1, layer.b1, layer.w2)]
    ((_, pairs, _),) = drawn[0]
    losses = []
    for head in range(4):
        mlp = layer.w1[head], layer.b1[head, 0], layer.w2[head]
        told = pairs.top[0, head].tolist(), pairs.rest.tolist()
        losses += papers_loss(mlp, q[0, head, at], k[0, head // 2], at, *told, gamma, alpha, beta)
    wanted = torch.stack(losses).mean()
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(wanted, [layer.w1, layer.b1, layer.w2])
    assert max(g.abs().max().item() for g in expected) > 1e-3, "an empty comparison"
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_sampled_pairs_estimate_the_loss_over_all_pairs():
    """The paper draws ranks and we draw tokens, both shared by all rows: the mean is the same."""
    layer, at = layer_of(), torch.tensor([30, 99])
    q, k, scaling = Drawn().read(0, 0)
    q = q[:, :, at].contiguous()
    p = attention(q, k, at, scaling, "query")
    many = sample_pairs(p.clone(), at, FRACTION, 2000, 20000, torch.Generator().manual_seed(0), "length", (0, 0))
    with torch.no_grad():
        got = _loss(layer, q, k, many, scaling, PAPER).item()
        losses = []
        for head in range(4):
            mlp = layer.w1[head], layer.b1[head, 0], layer.w2[head]
            logits = q[0, head] @ k[0, head // 2].T
            top = [logits[r, : n + 1].topk(5).indices.tolist() for r, n in enumerate(at.tolist())]
            losses += papers_loss(mlp, q[0, head], k[0, head // 2], at, top, range(T), 64.0, 3.0, 1.0)
    assert got == pytest.approx(torch.stack(losses).mean().item(), rel=0.02)


def test_rows_that_see_no_more_than_the_target_have_no_pair():
    at = torch.tensor([0, 3, 4, 5, 60])
    q, k, scaling = Drawn().read(0, 0)
    p = attention(q[:, :, at], k, at, scaling, "query")
    pairs = sample_pairs(p.clone(), at, FRACTION, 50, 500, torch.Generator().manual_seed(0), "length", (0, 0))
    assert pairs.valid.flatten(0, 1).any(-1).any(0).tolist() == [False, False, False, True, True]
    assert (pairs.top <= at[:, None]).all()  # only visible tokens


def test_squared_error_is_of_the_scores_themselves():
    scores, products = torch.tensor([[1.0, 5.0, 9.0]]), torch.tensor([[2.0, 2.0, -7.0]])
    valid = torch.tensor([[True, True, False]])
    assert squared_error(scores, products, valid).item() == pytest.approx((1 + 9) / 2)
    assert squared_error(scores, products, ~valid & False).item() == 0


def test_the_gaussian_start_is_normal_and_for_the_paper_alone():
    config = HasherConfig("paper", ModelShape(1, 8, 8, 64), hidden=128, init="gaussian")
    layer = make_layer(config, 0)
    for tensor in (layer.w1, layer.b1, layer.w2):
        assert tensor.std().item() == pytest.approx(1e-3, rel=0.06)
        assert tensor.mean().abs().item() < 2e-4
    with pytest.raises(ValueError, match="gaussian requires variant paper, got planes; use random"):
        HasherConfig("planes", SHAPE, init="gaussian")


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), "64", True])
def test_a_gamma_that_cannot_be_is_one_sentence(value):
    with pytest.raises(ValueError, match="gamma must be a finite number above 0"):
        HasherConfig("paper", SHAPE, gamma=value, init="random")


@pytest.mark.parametrize("value", [["steps"], {"steps": [1]}, {1: 2}, {str(n): n for n in range(65)}])
def test_a_record_that_cannot_be_is_one_sentence(value):
    with pytest.raises(ValueError, match="training must hold at most 64 strings and numbers"):
        HasherConfig("lsh", SHAPE, training=value)


def test_exact_recipes_are_the_papers_and_differ_in_one_thing():
    named = {c.name: c for c in ALL}
    assert len(named) == len(ALL)
    base = named["paper-exact"]
    assert (base.hidden, base.init, base.target, base.ends, base.first_trained) == (
        128,
        "gaussian",
        "length",
        (0, 0),
        0,
    )
    assert (base.gamma, base.alpha, base.beta, base.loss, base.estimator) == (64.0, 3.0, 1.0, "ranking", "")
    for other in EXACT[1:]:
        changed = {n for n in vars(base) if getattr(base, n) != getattr(other, n)} - {"name", "summary"}
        assert changed <= {"variant", "init"} or len(changed) == 1, other.name
    assert not {c.name for c in EXACT} & {c.name for c in ABLATIONS}


def test_flags_change_every_trained_hasher_and_nothing_else():
    words = ["--only", "lsh", "paper", "paper-exact", "--alpha", "1", "--target-ends", "2", "3", "--hidden", "64"]
    lsh, paper, exact = parse([*words, "--max-top", "5", "--loss", "mse"]).recipes
    assert lsh == TrainCommand(only=("lsh",)).recipes[0]
    for found in (paper, exact):
        assert (found.alpha, found.ends, found.hidden, found.max_top, found.loss) == (1, (2, 3), 64, 5, "mse")
    assert (paper.target, exact.target) == ("visible", "length")
    for change in ({"gamma": 0}, {"beta": -1}, {"alpha": math.inf}, {"max_top": 0}, {"target_ends": (-1, 0)}):
        with pytest.raises(UsageError, match="must be"):
            TrainCommand(**change)


def test_a_run_records_what_it_trained_with(folder, tmp_path, capsys):
    words = ["--only", "paper-exact", "paper-exact-untrained", "paper-residual", "--gamma", "32", "--alpha", "2"]
    assert main(command(folder, tmp_path, *words, "--max-rest", "99")) == 0
    capsys.readouterr()
    config = Hasher.from_pretrained(tmp_path / "paper-exact").config
    told = {"alpha": 2, "beta": 1, "max_top": 8, "max_rest": 99, "of": "length", "sink": 0, "min_position": 0}
    assert config.training.items() >= {**told, "recent": 0, "loss": "ranking", "steps": 2, "contexts": 2}.items()
    assert (config.gamma, config.hidden, config.residual) == (32, 128, False)
    untrained = json.loads((tmp_path / "paper-exact-untrained" / "config.json").read_text())
    assert (untrained["training"], untrained["gamma"]) == ({}, 64)
    assert Hasher.from_pretrained(tmp_path / "paper-residual").config.residual


@pytest.mark.parametrize("at", [1, 4])
def test_an_exact_training_interrupted_at_any_step_gives_the_same_bits(at, tmp_path):
    config = replace(PAPER, steps=6, rows=8, learning_rate=1e-3)
    whole = Training(layer_of(), 0, Drawn(), config)
    whole.run()
    file = Checkpoint(tmp_path / "layer.checkpoint", seconds=0)
    Training(layer_of(), 0, Drawn(), config, file).run(until=at)
    resumed = Training(layer_of(), 0, Drawn(), config, file)
    assert len(resumed.losses) == at
    resumed.run()
    assert resumed.losses == whole.losses
    mine, theirs = resumed.hasher.state_dict(), whole.hasher.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
