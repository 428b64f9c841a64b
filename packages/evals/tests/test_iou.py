"""The overlap task: its numbers against slow set arithmetic and against hashtrain's own."""

import json

import numpy as np
import pytest
import torch
from evals.methods import SELECTION_NAMES
from evals.metrics import by_place
from evals.settings import Always
from evals.tasks import iou
from evals.tasks.iou import HEADS, METRICS, Cell, measure
from hashtrain.data.capture import capturing
from hashtrain.evaluation.metrics import Quality, hash_quality
from rich.console import Console

NONE = Always(0, 0, 0)  # nothing is read without a search, as in the paper
POSITIONS = torch.tensor([32, 63, 64, 100, 127])
LAYERS = 3


def quality_of(loaded, names, budget, always=NONE):
    methods = [loaded.methods[name] for name in names]
    return measure(loaded.model, loaded.ids, POSITIONS, methods, (budget,), always)


@pytest.mark.parametrize("heads", HEADS)
def test_oracle_is_perfect_and_everything_is_at_the_whole_budget(loaded, heads):
    small, whole = quality_of(loaded, ["oracle"], 0.1), quality_of(loaded, SELECTION_NAMES, 1.0)
    for found in (small[Cell("oracle", 0.1, heads)], *(whole[Cell(name, 1.0, heads)] for name in SELECTION_NAMES)):
        for metric in METRICS:
            assert np.array(found[metric]) == pytest.approx(float(metric != "lost"))


@pytest.mark.parametrize("name", ["lsh", "paper", "planes"])
def test_hashed_methods_agree_with_hashtrain(loaded, name):
    found = quality_of(loaded, [name], 0.1, Always())
    hasher = loaded.methods[name].selector.hasher
    seen = []

    def sink(layer, q, k, v, scaling):
        for heads in HEADS:
            by_query_head = heads == "query_head"
            other = hash_quality(hasher.layer(layer), q[:, :, POSITIONS], k, POSITIONS, 0.1, scaling, by_query_head)
            figures = {metric: getattr(other, metric)[0].double().mean(-1).tolist() for metric in Quality._fields}
            figures["low"] = np.quantile(other.mass[0].double().numpy(), 0.05, axis=-1).tolist()
            figures["lost"] = (other.mass[0] < 0.5).double().mean(-1).tolist()
            for metric in METRICS:
                seen.append(found[Cell(name, 0.1, heads)][metric][layer] == pytest.approx(figures[metric]))

    with torch.inference_mode(), capturing(loaded.model, sink):
        loaded.model(loaded.ids[None], use_cache=False)
    assert len(seen) == LAYERS * len(HEADS) * len(METRICS)
    assert all(seen)


def test_the_mean_excludes_dense_layers():
    # Two documents, two layers, two heads; layer 0 stays dense.
    values = np.array([[[9.0, 9.0], [0.0, 2.0]], [[9.0, 9.0], [2.0, 4.0]]])
    found = {(at["layer"], at["head"]): estimate for at, estimate in by_place(values, [1], seed=0)}
    assert tuple(found[None, None]) == (2.0, 1.0, 3.0)
    assert found[0, None].mean == 9.0
    assert found[1, None].mean == 2.0
    assert tuple(found[1, 1]) == (3.0, 2.0, 4.0)
    assert len(found) == 1 + 2 + 4


def test_a_run_stores_rows_and_resumes(iou_command, monkeypatch):
    command = iou_command(methods=("oracle", "lsh", "planes"))
    found = iou.run(command, Console(quiet=True))
    row = found.one(method="lsh", metric="iou", heads="kv_head", layer=1, head=0)
    samples = [json.loads((command.out / "samples" / f"{i:04d}.json").read_text()) for i in range(3)]
    cells = [next(c for c in s["cells"] if (c["method"], c["heads"]) == ("lsh", "kv_head")) for s in samples]
    assert row.value == pytest.approx(np.mean([cell["iou"][1][0] for cell in cells]))
    assert 0 < row.low <= row.value <= row.high < 1
    assert 0.08 < row.density <= 0.1
    monkeypatch.setattr(iou, "measure", None)
    assert iou.run(command, Console(quiet=True)) == found
