"""Draw quality against the length of the context from the results stored in docs/results.

uv run tools/draw_reach.py           # write docs/figures/reach.png
uv run tools/draw_reach.py --check   # change nothing; exit 1 if the results have changed since it was drawn
"""

import hashlib
import pathlib
from typing import Any

from evals.figures import COLOURS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from readme_tables.reach import MODELS, kl, rows_of
from readme_tables.stored import RESULTS, stored
from stored_figure import png, run

OUT = RESULTS.parent / "figures" / "reach.png"
INPUTS = tuple(f"{name}.json" for name in MODELS)
LINES = {
    "oracle": ("exact top-k", COLOURS["oracle"], "--"),
    "lsh": ("LSH, untrained", COLOURS["lsh"], "-"),
    "4096-reach/paper": ("paper, offsets", COLOURS["paper"], "-"),
    "4096/transform-start": ("transform's start, all at 0", COLOURS["transform"], ":"),
    "4096-reach/transform-start": ("transform's start, offsets", COLOURS["transform"], "-"),
    "4096-reach/transform+remainder": ("transform + remainder, offsets", "#009e73", "-"),
}
"""Methods: their name, colour and style, in the order of the legend."""


def digest(results: pathlib.Path = RESULTS) -> str:
    """Return a digest of what the figure depends on."""
    return hashlib.sha256(b"".join((results / name).read_bytes() for name in INPUTS)).hexdigest()[:16]


def _panel(axes: Axes, name: str, measured: dict[str, Any]) -> None:
    found = rows_of(measured)
    lengths = sorted({row["length"] for row in measured["rows"]})
    for method, (label, colour, style) in LINES.items():
        places = sorted((n, kl(rows)) for n, rows in found.get(method, {}).items())
        if places:
            axes.plot(*zip(*places, strict=True), label=label, color=colour, linestyle=style, marker="o", markersize=4)
    axes.axvline(4096, color="#bbbbbb", linewidth=1, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", title=MODELS[name])
    axes.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
    axes.set_yticks([0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5], ["0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def draw(results: pathlib.Path = RESULTS) -> bytes:
    """Return the figure as PNG."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for axes, name in zip(panels, MODELS, strict=True):
        _panel(axes, name, stored(results, name))
    panels[0].set_ylabel("KL from dense, nats")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle("Hashers made from contexts of 4,096 tokens (line), 2 % of the tokens read", fontsize=10)
    return png(figure, 110, digest(results))


if __name__ == "__main__":
    run(__doc__, OUT, digest, draw)
