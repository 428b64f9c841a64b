"""Draw the figure of README.md from the results stored in docs/results.

    uv run tools/draw_overview.py           # write docs/figures/overview.png
    uv run tools/draw_overview.py --check   # change nothing; exit 1 if the results have changed since it was drawn

The figure stores a digest of its data, because pixels differ between versions of fonts and libraries.
"""

import hashlib
import json
import pathlib

import matplotlib.pyplot as plt
from evals.figures import COLOURS
from evals.frontier import Point, points, require_comparable
from evals.result import Result, read_json, rows_from_json
from matplotlib.axes import Axes
from readme_tables.headline import FRONTIER_RUNS
from stored_figure import png, run

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
OUT = ROOT / "docs" / "figures" / "overview.png"
QUALITY = tuple(f"{name}.json" for name in FRONTIER_RUNS)
SPEED = "llama_cpp.json"
INPUTS = (*QUALITY, SPEED)
HEAD_DIM = 64
OURS = "#009e73"
LINES = {
    "lsh": ("LSH, untrained", COLOURS["lsh"], "-"),
    "quest": ("Quest", COLOURS["quest-heads"], "-."),
    "paper": ("the paper's MLP hash", COLOURS["paper"], "-"),
    "oracle": ("exact top-k (cost of the search not counted)", COLOURS["oracle"], "--"),
    "transform+remainder": ("ours", OURS, ":"),
}
"""Methods of the left panel: their name, colour and style, in the order of the legend."""
WAYS = {
    "transformers": ("Hugging Face transformers", "#4d4d4d"),
    "llama.cpp": ("llama.cpp", "#0072b2"),
    "ours, dense": ("ours without sparsity", "#8fd0b5"),
    "ours": ("ours", OURS),
}


def digest(results: pathlib.Path = RESULTS) -> str:
    """Return a digest of what the figure depends on."""
    sha = hashlib.sha256()
    for name in INPUTS:
        sha.update((results / name).read_bytes())
    return sha.hexdigest()[:16]


def _load(path: pathlib.Path) -> Result:
    data = read_json(path, "store a run")
    return Result(data["config"], data["environment"], rows_from_json(data))


def _quality(axes: Axes, found: list[Point]) -> None:
    for method, (label, colour, style) in LINES.items():
        plain = [point for point in found if point.line == method]
        if not plain:
            continue
        axes.plot(*_places(plain), label=label, color=colour, linestyle=style, marker="o", markersize=4)
    fewest = [point for point in found if point.method == "transform+remainder" and "values" in point.settings]
    label = "ours, with a shortlist and a third of the values"
    axes.plot(*_places(fewest), label=label, color=OURS, marker="D", linewidth=2.6)
    _finish(axes, "bytes requested by a layer's step, % of dense attention", "KL from dense, nats")
    axes.set_xticks([2, 5, 10, 20], ["2", "5", "10", "20"])
    axes.set_yticks([0.01, 0.02, 0.05, 0.1], ["0.01", "0.02", "0.05", "0.1"])
    axes.set_title("Quality: SmolLM2-135M, English, 8,192 tokens", fontsize=10)


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


def _places(found: list[Point]) -> tuple[list[float], list[float]]:
    return [100 * point.share for point in found], [point.kl.value for point in found]


def _speed(axes: Axes, timed: dict) -> None:
    lengths = [row["tokens"] for row in timed["rows"]]
    for way, (label, colour) in WAYS.items():
        taken = [row["steps"][way]["ms"] for row in timed["rows"]]
        axes.plot(lengths, taken, label=label, color=colour, marker="o", linewidth=2.6 if way == "ours" else 1.5)
    _finish(axes, "context, tokens", "milliseconds a token")
    axes.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
    axes.set_yticks([50, 100, 200, 400], ["50", "100", "200", "400"])
    axes.set_title(f"Speed: {timed['processor']}, {timed['threads']} threads, 16-bit weights", fontsize=10)


def draw(results: pathlib.Path = RESULTS) -> bytes:
    """Return the figure as PNG."""
    runs = [_load(results / name) for name in QUALITY]
    require_comparable(runs)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    _quality(left, points(runs, HEAD_DIM))
    _speed(right, json.loads((results / SPEED).read_text()))
    return png(figure, 110, digest(results))


if __name__ == "__main__":
    run(__doc__, OUT, digest, draw)
