"""What a run says of its worst rows: sentences, table and card, from made-up metrics."""

from hashtrain import HasherConfig, ModelShape
from hashtrain.run.report import card, quality_table, sentences


def layer(low, lost):
    means = {"iou": 0.5, "recall": 0.6, "mass": 0.7, "low": min(low), "lost": sum(lost) / len(lost)}
    return {**means, "low_by_head": low, "lost_by_head": lost}


def metrics(**changes):
    """Two heads in each of three layers: 2.1 fails, 0.0 would, but its layer is dense."""
    heads = [layer([0.1, 0.9], [0.3, 0.0]), layer([0.8, 0.7], [0.0, 0.0005]), layer([0.9, 0.55], [0.0, 0.002])]
    side = {"layers": heads, "mean": {"iou": 0.5, "mass": 0.7}}
    found = {"kv_head": side, "query_head": side, "dense_layers": [0], "failing": [[2, 1]]}
    found |= {"repaired": {"1": {"0": "start of 4 digits"}}}
    found |= {"cost": {"layers": [0.5, 0.0, 0.0], "all": 0.51, "dense": [0], "bare": [1]}, **changes}
    facts = {"layers": 3, "steps": 9, "contexts": 2, "context": 512, "held_out": 1, "fraction": 0.02}
    return {**facts, "version": "1", "corpus": "texts", "hashers": {"transform": found}}


def test_failing_heads_repairs_and_dense_layers_are_named():
    (line,) = sentences(metrics())
    for said in ("such rows: layer 2 head 1 (0.55, 0.2 %).", "Repaired: layer 1 head 0 (start of 4 digits)."):
        assert said in line
    assert "moves by 0.510 nats (KL). Layers to keep dense: 0; without a remainder: 1." in line
    assert sentences(metrics(failing=[], repaired={}, cost=None)) == []
    (line,) = sentences(metrics(failing=[[2, 1]] * 9))
    assert (line.count("layer 2 head 1 ("), line.count(" ...")) == (8, 1)


def test_the_table_and_the_card_show_the_worst_head_and_each_hashers_own_dense_layers():
    data = metrics()
    data["hashers"]["lsh"] = {**data["hashers"]["transform"], "dense_layers": []}
    ours, theirs = (list(column.cells) for column in quality_table(data, "kv_head").columns[1:])
    assert ours == [
        "0.500 / 0.700 / 0.10 / 30 % (dense)",
        "0.500 / 0.700 / 0.70 / 0.05 %",
        "0.500 / 0.700 / 0.55 / 0.2 %",
        "0.500 / 0.700 / 0.55 / 0.2 %",
    ]
    assert theirs[0] == theirs[-1] == "0.500 / 0.700 / 0.10 / 30 %"
    text = card(HasherConfig("transform", ModelShape(3, 4, 2, 32), dense_layers=(0,)), "transform", data)
    assert "| 1 | 0.500 | 0.700 | 0.70 | 0.05 % |" in text
    assert "Layers that stay dense: 0." in text
