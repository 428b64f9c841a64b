"""What a run says of its worst rows: table, sentences and card, from made-up metrics."""

from hashtrain import HasherConfig, ModelShape
from hashtrain.run.report import card, quality_table, sentences


def layer(low, lost):
    means = {"iou": 0.5, "recall": 0.6, "mass": 0.7, "low": min(low), "lost": sum(lost) / len(lost)}
    return {**means, "low_by_head": low, "lost_by_head": lost}


def test_the_worst_head_of_the_sparse_layers_is_told():
    """Two heads in each of three layers: 2.1 fails, 0.0 would, but its layer is dense."""
    layers = [layer([0.1, 0.9], [0.3, 0.0]), layer([0.8, 0.7], [0.0, 0.0005]), layer([0.9, 0.55], [0.0, 0.002])]
    found = {"kv_head": {"layers": layers, "mean": {"iou": 0.5, "mass": 0.7}}, "dense_layers": [0], "failing": [(2, 1)]}
    found |= {"repaired": {"1": {"0": "start of 4 digits"}}, "cost": {"all": 0.51, "bare": [1]}}
    facts = {"layers": 3, "steps": 9, "contexts": 2, "context": 512, "held_out": 1, "fraction": 0.02}
    data = {**facts, "version": "1", "corpus": "texts", "hashers": {"transform": found}}
    (row,) = zip(*(column.cells for column in quality_table(data).columns), strict=True)
    assert row == ("transform", "0.500", "0.700", "0.55", "0.2 %", "0", "0.510")
    (line,) = sentences(data)
    assert "heads that fail: layer 2 head 1" in line
    text = card(HasherConfig("transform", ModelShape(3, 4, 2, 32), dense_layers=(0,)), "transform", data)
    assert "0.500 (IoU)" in text
