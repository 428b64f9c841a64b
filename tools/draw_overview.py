"""Draw the figure of README.md from the results stored in docs/results.

    uv run tools/draw_overview.py           # write docs/figures/overview.png
    uv run tools/draw_overview.py --check   # change nothing; exit 1 if the results have changed since it was drawn

The figure stores a digest of its data, because pixels differ between versions of fonts and libraries.
"""

import hashlib
import pathlib
from typing import Any

from evals.figures import COLOURS
from evals.results import Result
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from readme_tables.quality import OURS, TEXTS, step_share
from readme_tables.stored import RESULTS, load, stored
from stored_figure import png, run

OUT = pathlib.Path(__file__).resolve().parent.parent / "docs" / "figures" / "overview.png"
QUALITY, SPEED = TEXTS["English"], "llama_cpp"
INPUTS = tuple(f"{name.partition('/')[0]}.json" for name in (QUALITY, SPEED))
GREEN = "#009e73"
METHODS = {
    "lsh": ("LSH, untrained", COLOURS["lsh"]),
    "paper": ("the paper's MLP hash", COLOURS["paper"]),
    "oracle": ("exact top-k (cost of the search not counted)", COLOURS["oracle"]),
    "transform": ("ours, without the remainder", "#8fd0b5"),
    OURS: ("ours", GREEN),
}
"""Methods of the left panel: their name and colour, in the order of the legend."""
WAYS = {
    "transformers": ("Hugging Face transformers", "#4d4d4d"),
    "llama.cpp": ("llama.cpp", "#0072b2"),
    "ours, dense": ("ours without sparsity", "#8fd0b5"),
    "ours": ("ours", GREEN),
}


def digest(results: pathlib.Path = RESULTS) -> str:
    """Return a digest of what the figure depends on."""
    return hashlib.sha256(b"".join((results / name).read_bytes() for name in INPUTS)).hexdigest()[:16]


def draw(results: pathlib.Path = RESULTS) -> bytes:
    """Return the figure as PNG."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _quality(left, load(results, QUALITY))
    _speed(right, stored(results, SPEED))
    return png(figure, 110, digest(results))


def _quality(axes: Axes, run: Result) -> None:
    budget = run.config["budgets"][0]
    for method, (label, colour) in METHODS.items():
        kl = run.one(method=method, metric="kl", budget=budget, against=None).value
        place = [100 * step_share(run, method)], [kl]
        axes.plot(*place, label=label, color=colour, marker="D" if method == OURS else "o", linestyle="", markersize=8)
    _finish(axes, "bytes requested by a layer's step, % of dense attention's", "KL from dense, nats")
    axes.set(xlim=(1.5, 32), ylim=(0.006, 0.15))
    axes.set_xticks([2, 5, 10, 20], ["2", "5", "10", "20"])
    axes.set_yticks([0.02, 0.05, 0.1], ["0.02", "0.05", "0.1"])
    tokens = run.config["context"]
    axes.set_title(f"Quality: SmolLM2-135M, English, {tokens:,} tokens, {100 * budget:g} % selected", fontsize=10)


def _speed(axes: Axes, timed: dict[str, Any]) -> None:
    lengths = [row["tokens"] for row in timed["rows"]]
    for way, (label, colour) in WAYS.items():
        taken = [row["steps"][way]["ms"] for row in timed["rows"]]
        axes.plot(lengths, taken, label=label, color=colour, marker="o", linewidth=2.6 if way == "ours" else 1.5)
    _finish(axes, "context, tokens", "milliseconds a token")
    axes.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
    axes.set_yticks([50, 100, 200, 400], ["50", "100", "200", "400"])
    axes.set_title(f"Speed: {timed['processor']}, {timed['threads']} threads, 16-bit weights", fontsize=10)


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    run(__doc__, OUT, digest, draw)
