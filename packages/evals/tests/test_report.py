"""Tables and figures, for every kind of result."""

from evals.results import Result, Row
from evals.tables import grids, pivot


def row(metric, value, method="lsh", **more):
    made = {"task": "ppl", "variant": method, "bits": 64, "budget": 0.1, "rule": "visible", "density": 0.25}
    made |= {"dense_layers": 0, "sink": 0, "recent": 0, "phase": "rows", "low": None, "high": None, "n": 2, "seed": 0}
    return Row(**made | {"versions": "", "method": method, "metric": metric, "value": value, **more})


def test_a_pivot_keeps_the_order_and_leaves_blanks():
    rows = [row("kl", 1.0), row("nll", 2.0), row("kl", 3.0, "oracle"), row("kl", 4.0, budget=0.2)]
    names, sections = pivot(rows, lambda r: r.budget, lambda r: r.method, lambda r: r.metric, lambda r: f"{r.value:g}")
    assert names == ["kl", "nll"]
    assert sections == [[["lsh", "1", "2"], ["oracle", "3", ""]], [["lsh", "4", ""]]]


def test_a_result_has_a_table_of_numbers_one_of_differences_and_one_by_layer():
    rows = [row("iou", 0.5, heads="kv_head"), row("iou", 0.4, heads="kv_head", layer=0), row("iou", 9.0, head=1)]
    rows.append(row("kl", -0.1, low=-0.2, high=-0.05, against="oracle"))
    config = {"task": "made", "model": "demo", "sink": 1, "recent": 4, "dense_layers": 0, "context": 64}
    whole, differences, layers = grids(Result(config, {}, rows))
    assert whole.header == ["case", "iou", "density"]
    assert whole.lines == [["per KV head, 10 %, lsh", "0.5", "25 %"]]
    assert differences.lines == [["10 %, lsh - oracle", "-0.1000 [-0.2000, -0.0500]"]]
    assert (layers.header, layers.lines) == (["layer", "lsh"], [["0", "0.4"]])
    assert all("the first token and the last 4 tokens always read" in grid.title for grid in (whole, differences))
