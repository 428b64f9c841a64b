"""What a run says of its worst rows: lines, table, card and dense layers, from made-up metrics."""

import pytest
from hashtrain import HasherConfig, ModelShape
from hashtrain.reporting.report import card, quality_table
from hashtrain.reporting.worst import dense_of, figures, worst_lines


def layer(low, lost):
    means = {"iou": 0.5, "recall": 0.6, "mass": 0.7, "low": min(low), "lost": sum(lost) / len(lost)}
    return {**means, "low_by_head": low, "lost_by_head": lost}


def metrics(**changes):
    """Two heads in each of three layers: 2.1 fails, 0.0 would, but its layer is dense."""
    heads = [layer([0.1, 0.9], [0.3, 0.0]), layer([0.8, 0.7], [0.0, 0.0005]), layer([0.9, 0.55], [0.0, 0.002])]
    side = {"layers": heads, "mean": {"iou": 0.5, "mass": 0.7}}
    rest = {"layers": [{"share": 0.1, "error": 0.02}] * 3, "mean": {"share": 0.1, "error": 0.02}}
    found = {"kv_head": side, "query_head": side, "remainder": rest, "dense_layers": [0], "failing": [[2, 1]]}
    found |= {"repaired": {"1": {"0": "start of 4 digits"}}}
    found |= {"cost": {"layers": [0.5, 0.0, 0.0], "all": 0.51, "dense": [0], "bare": [1], "without": {}}, **changes}
    facts = {"layers": 3, "steps": 9, "contexts": 2, "context": 512, "held_out": 1, "fraction": 0.02}
    facts |= {"version": "1", "corpus": "texts", "sink": 1, "recent": 4}
    return {**facts, "hashers": {"transform": found}}


def test_the_worst_rows_of_the_sparse_layers_failing_heads_and_repairs_are_named():
    (line,) = worst_lines(metrics())
    assert "in the worst head (layer 2) 5 % of the rows find at most 0.55 of the attention mass." in line
    assert "No head has more than 0.2 % of rows that find less than half of it." in line
    assert (
        "Heads that fail, with the 5th percentile of the mass and the share of such rows: layer 2 head 1 (0.55, 0.2 %)."
        in line
    )
    assert "Repaired: layer 1 head 0 (start of 4 digits)." in line
    assert (
        "the next token's distribution moves by 0.510 nats (KL). Layers to keep dense: 0; without a remainder: 1."
        in line
    )


def test_nothing_is_said_of_what_did_not_happen():
    calm = metrics(failing=[], repaired={}, cost=None)
    for found in calm["hashers"]["transform"]["kv_head"]["layers"]:
        found["lost_by_head"] = [0.0, 0.0]
    (line,) = worst_lines(calm)
    assert line.endswith("No row finds less than half of it.")
    assert not any(word in line for word in ("fail", "Repaired", "dense"))


def test_many_failing_heads_are_cut_short():
    (line,) = worst_lines(metrics(failing=[[2, 1]] * 9))
    assert line.count("layer 2 head 1 (") == 8
    assert " ..." in line


def test_the_table_shows_the_worst_head_and_marks_each_hashers_own_dense_layers():
    data = metrics()
    data["hashers"]["lsh"] = {**data["hashers"]["transform"], "dense_layers": []}
    table = quality_table(data, "kv_head")
    ours, theirs = (list(column.cells) for column in table.columns[1:])
    assert ours == [
        "0.500 / 0.700 / 0.10 / 30 % (dense)",
        "0.500 / 0.700 / 0.70 / 0.05 %",
        "0.500 / 0.700 / 0.55 / 0.2 %",
        "0.500 / 0.700 / 0.55 / 0.2 %",
    ]
    assert theirs[0] == theirs[-1] == "0.500 / 0.700 / 0.10 / 30 %"


def test_metrics_without_figures_by_head_show_what_they_have():
    found = {"layers": [{"iou": 0.5, "mass": 0.7, "low": 0.6}], "mean": {"iou": 0.5, "mass": 0.7}}
    assert figures(found, [], 0) == figures(found, []) == "0.500 / 0.700"


@pytest.mark.parametrize(
    ("asked", "hasher", "dense"),
    [
        (None, {"dense_layers": [2], "cost": {"dense": [1]}}, [2]),
        (0, {"cost": {"dense": [1]}}, [1]),  # metrics of older runs
        (2, {"cost": {"dense": [1]}}, [0, 1]),
        (0, {}, []),
    ],
)
def test_dense_layers_of_runs_of_any_version(asked, hasher, dense):
    data = {"hashers": {"planes": hasher}, **({} if asked is None else {"dense_layers": asked})}
    assert dense_of(data, "planes") == dense


def test_the_card_names_worst_heads_failing_heads_and_repairs():
    config = HasherConfig("transform", ModelShape(3, 4, 2, 32), dense_layers=(0,))
    text = card(config, "transform", metrics())
    assert "| 1 | 0.500 | 0.700 | 0.70 (1) | 0.05 % (1) |" in text
    assert "| 2 | 0.500 | 0.700 | 0.55 (1) | 0.2 % (1) |" in text
    assert "Layers that stay dense: 0." in text
    assert "fail on the held-out rows, with their low and lost: layer 2 head 1 (0.55, 0.2 %)." in text
    assert "Repaired heads, with what each got: layer 1 head 0 (start of 4 digits)." in text
    assert "below 0.6 or\nits lost above 0.1 %" in text
    text = card(config, "transform", metrics(failing=[], repaired={}))
    assert "with their low and lost: none." in text
    assert "with what each got: none." in text
