"""The stored results, which README.md shows, still belong to the committed model and still say what is claimed."""

import json
import pathlib
from collections import Counter
from importlib.metadata import version

import pytest
from evals.result import Result, rows_from_json
from evals.runner import model_identity
from hashtrain.demo import demo_model_path
from hashtrain.models import load_model
from hashtrain.reporting.worst import dense_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "results"


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def ppl():
    data = read("ppl")
    return Result(data["config"], data["environment"], rows_from_json(data))


def test_perplexity_was_measured_on_the_committed_model(ppl):
    model, _ = load_model(str(demo_model_path()))
    assert ppl.config["model_identity"] == model_identity(model.float())


def test_planes_finds_more_of_the_target_than_lsh_and_paper():
    training = read("training")
    assert training["held_out"] >= 20
    mean = {name: found["kv_head"]["mean"] for name, found in training["hashers"].items()}
    planes = mean["planes"]
    assert planes["iou"] >= 0.55
    assert planes["mass"] >= 0.95
    assert planes["iou"] >= mean["lsh"]["iou"] + 0.12
    assert planes["iou"] >= mean["paper"]["iou"] + 0.04


def test_transform_finds_the_target_and_its_mass_with_the_default_recipe():
    mean = {name: found["kv_head"]["mean"] for name, found in read("training")["hashers"].items()}
    assert mean["transform"]["iou"] >= max(0.60, mean["planes"]["iou"] + 0.05)
    assert mean["transform"]["mass"] >= 0.965  # of what is found beside the tokens that every row reads


def test_ablations_have_the_order_of_the_paper():
    mean = {name: found["kv_head"]["mean"]["iou"] for name, found in read("ablations")["hashers"].items()}
    order = ("paper-untrained", "lsh", "linear", "paper", "planes", "transform")
    assert [mean[name] for name in order] == sorted(mean[name] for name in order)
    assert mean["paper"] > mean["paper-reconstruction"]
    assert mean["planes-64"] >= mean["group-xnor"]
    assert mean["planes-64"] > mean["down-proj"]
    assert mean["transform"] > mean["transform-start"] > mean["planes-64"]  # started, but not trained


CLOSER = [
    (*pair, budget)
    for pair in (
        *(("planes", other) for other in ("lsh", "paper", "recent")),
        *(("planes+remainder", "planes"), ("transform", "planes"), ("transform+remainder", "transform")),
        *(("transform+remainder", "planes+remainder"), ("transform+remainder", "oracle")),
    )
    for budget in (0.02, 0.01, 0.005)
    if (pair[1], budget) != ("oracle", 0.005)  # there what is missed weighs more
]
"""At these budgets the first of two methods is closer to dense; the oracle drops what the remainder adds back."""


@pytest.mark.parametrize("rule", ["visible", "fixed"])
@pytest.mark.parametrize(("method", "other", "budget"), CLOSER)
def test_better_codes_and_the_remainder_bring_it_closer_to_dense(ppl, rule, budget, method, other):
    found = ppl.one(method=method, metric="kl", rule=rule, budget=budget, against=other)
    assert found.n >= 8
    assert found.value < found.high < 0


# No layer is dense. What `attach` does keeps within 1 %; the selection alone misses it (docs/log.md).
@pytest.mark.parametrize(
    ("method", "rule", "at_most"),
    [
        ("transform+remainder", "visible", 1.005),
        ("transform+remainder", "fixed", 1.005),
        ("planes+remainder", "visible", 1.01),
        ("planes+remainder", "fixed", 1.01),
        ("planes", "visible", 1.025),
        ("planes", "fixed", 1.015),
    ],
)
def test_planes_keeps_perplexity_near_dense_at_two_percent(ppl, method, rule, at_most):
    ratio = ppl.one(method=method, metric="perplexity_ratio", rule=rule, budget=0.02, against=None)
    assert ratio.value <= at_most


@pytest.mark.parametrize("rule", ["visible", "fixed"])
def test_a_recent_window_of_the_same_size_is_far_worse(ppl, rule):
    assert ppl.one(method="recent", metric="perplexity_ratio", rule=rule, budget=0.02, against=None).value >= 1.08


@pytest.mark.parametrize("ours", ["planes", "transform", "transform+remainder"])
def test_ours_at_2_percent_lose_less_than_quest_at_8(ours):
    found = [x for x in read("differences")["table 2"] if x["a"] == [ours, 0.02] and x["b"][1] == 0.08]
    high = {(x["b"][0], x["metric"]): x["high"] for x in found}
    for rival in ("quest", "quest-heads"):
        assert high[rival, "kl"] < 0
        assert high[rival, "nll"] < 0
        assert high[f"{rival}-tuned", "kl"] < 0  # tuned on the hashers' own text


@pytest.mark.parametrize("metric", ["kl", "nll"])
@pytest.mark.parametrize("ours", ["planes", "transform", "transform+remainder"])
def test_ours_lose_less_than_magicpig_at_its_own_density_and_than_its_bare_form(ours, metric):
    data = read("magicpig")
    rows = rows_from_json(data)
    for rival, rule in (
        ("magicpig", "as magicpig"),
        ("magicpig-10x150", "as magicpig-10x150"),
        ("magicpig-bare", "visible"),
    ):
        (row,) = (r for r in rows if (r.method, r.rule, r.against, r.metric) == (ours, rule, rival, metric))
        assert row.high < 0, (rival, row)


def test_every_learned_hash_finds_more_at_128_bits_than_at_32_and_than_lsh():
    config, rows = read("codelength")["config"], rows_from_json(read("codelength"))
    found = {r.method: r.value for r in rows if r.metric == "iou" and r.heads == "kv_head" and r.layer is None}
    for name in ("paper", "planes", "transform"):
        assert name in config["methods"]
        assert found[f"{name} at 32"] < found[name]
        assert found["lsh-128"] < found[name]


@pytest.mark.parametrize("name", ["second_english", "second_python"])
def test_the_second_models_figures_are_of_its_own_hashers_and_say_the_same(name):
    """What is claimed of it is the order of methods by KL, pair by pair."""
    data, training = read(name), read("second_training")
    config = data["config"]
    assert config["context"] == training["context"] > read("ppl")["config"]["context"]
    assert config["model"].rpartition("/")[2] == training["model"]
    assert config["dense_layers"] == 0
    assert [dense_of(training, hasher) for hasher in ("lsh", "transform")] == [[], []]
    assert config["documents"] >= 8
    assert config["method_identities"] == read("second_english")["config"]["method_identities"]
    assert config["method_identities"]["transform"] == config["method_identities"]["transform+remainder"]
    mean = {name: found["kv_head"]["mean"] for name, found in training["hashers"].items()}
    for score in ("iou", "mass"):
        assert mean["transform"][score] > mean["transform-start"][score] > mean["lsh"][score]
    found = Result(config, data["environment"], rows_from_json(data))
    (budget,), (rule,) = config["budgets"], config["rules"]
    for other in ("transform", "lsh", "recent"):
        pair = {"method": "transform+remainder", "against": other, "metric": "kl", "rule": rule, "budget": budget}
        assert found.one(**pair).high < 0


@pytest.mark.parametrize("model", ["training", "second_training"])
def test_no_head_of_transform_misses_much_in_its_worst_rows(model):
    """What must hold, for every head of both models (ADR 12): a tenth of a percent of lost rows, 5th percentile .6."""
    stored = read(model)
    found = stored["hashers"]["transform"]
    assert stored["held_out"] * stored["held_out_rows"] >= 1000  # one lost row of 999 would be too many
    assert len(found["kv_head"]["layers"]) == stored["layers"]
    for number, layer in enumerate(found["kv_head"]["layers"]):
        for head, (low, lost) in enumerate(zip(layer["low_by_head"], layer["lost_by_head"], strict=True)):
            assert low >= 0.6, (number, head)
            assert lost <= 0.001, (number, head)
    assert found["failing"] == []
    assert len(found["cost"]["dense"]) <= stored["layers"] / 10


def test_lsh_would_repair_no_head():
    """It finds less than the untrained start in every layer, so repairs leave it out (ADR 12)."""
    for model, layers in (("second_training", 30), ("ablations", 6)):
        found = read(model)["hashers"]
        sides = [found[name]["kv_head"]["layers"] for name in ("lsh", "transform-start")]
        assert len(sides[0]) == layers
        for lsh, start in zip(*sides, strict=True):
            assert all(lsh[score] < start[score] for score in ("iou", "mass", "low"))
            assert lsh["lost"] >= start["lost"]


@pytest.mark.parametrize("method", ["transform+remainder", "transform-start+remainder"])
@pytest.mark.parametrize("name", ["second_english", "second_python"])
def test_no_text_is_worse_than_with_lsh(name, method):
    """`nll_most` is the largest difference of one text; the mean alone could hide a text that is worse."""
    data = read(name)
    assert data["config"]["documents"] >= 8
    found = [
        row for row in rows_from_json(data) if (row.metric, row.method, row.against) == ("nll_most", method, "lsh")
    ]
    assert [row.rule for row in found] == data["config"]["rules"]
    assert all(row.value < 0 and row.n == data["config"]["documents"] for row in found)


def test_the_host_takes_at_most_15_microseconds_for_a_layers_calls_on_a_gpu():
    found = read("host_cost")
    assert found["together"] == pytest.approx(found["encode"] + found["search"] + found["attend"], abs=0.2)
    assert found["together"] <= 15


def test_families_of_the_pinned_transformers_are_equal_or_refused():
    found = read("families")
    assert found["transformers"] == version("transformers")
    verdicts = Counter(verdict for verdict, _ in found["families"].values())
    assert set(verdicts) <= {"equal", "refused", "not built"}
    assert verdicts["equal"] >= 70
    assert verdicts.total() == len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
