"""The generated figures of docs/figures. Each stores a digest of its data: pixels differ between versions of fonts."""

import hashlib
import io
import pathlib
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from readme_tables.stored import RESULTS, load, stored
from readme_tables.values import NAMES, OURS, kl, reach, step_share, value, waits

# Okabe and Ito's palette, safe for colour-blind readers.
GREEN, PALE = "#009e73", "#8fd0b5"
COLOURS = {"oracle": "#000000", "lsh": "#56b4e9", "paper": "#e69f00", "transform": "#cc79a7"}
METHODS = {
    "lsh": ("lsh", COLOURS["lsh"]),
    "paper": ("paper", COLOURS["paper"]),
    "oracle": ("oracle (cost of its search not counted)", COLOURS["oracle"]),
    "transform": ("transform", PALE),
    OURS: (f"{OURS} (ours)", GREEN),
}
"""Methods of the overview: their name and colour, in the order of the legend."""
WAYS = {
    "llama.cpp": ("llama.cpp, its 4-bit file", "#0072b2", "-"),
    "transformers": ("transformers", "#4d4d4d", "-"),
    "exact": ("ours, exact", "#cc79a7", "-"),
    "sparse prompt": ("ours, sparse", GREEN, "-"),
    "session": ("ours, asked again", GREEN, ":"),
}
"""Ways to answer: their name, colour and style."""
REACHES = {
    "oracle": ("exact top-k", COLOURS["oracle"], "--"),
    "lsh": ("LSH, untrained", COLOURS["lsh"], "-"),
    "4096-reach/paper": ("paper, offsets", COLOURS["paper"], "-"),
    "4096/transform-start": ("transform's start, all at 0", COLOURS["transform"], ":"),
    "4096-reach/transform-start": ("transform's start, offsets", COLOURS["transform"], "-"),
    "4096-reach/transform+remainder": ("transform + remainder, offsets", GREEN, "-"),
}
"""Methods of the figure of quality against length: their name, colour and style."""
MODELS = "reach_smol", "reach_qwen"


def overview(results: pathlib.Path) -> Figure:
    """Draw the time of whole answers against length, and quality against bytes read."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    run, timed = load(results, "qwen15/english"), stored(results, "answers")
    lengths = [row["n"] for row in timed["rows"]]
    for way, (label, colour, style) in WAYS.items():
        taken = [(row["n"], sum(waits(row)[way])) for row in timed["rows"] if way in waits(row)]
        left.plot(*zip(*taken, strict=True), label=label, color=colour, linestyle=style, marker="o", linewidth=2)
    _finish(left, "tokens of the document", "seconds")
    _ticks(left, {n: f"{n // 1024}K" for n in lengths}, (10, 20, 50, 100, 200, 500))
    left.set_title(
        f"Prompt and {timed['tokens']} tokens: {NAMES[timed['model']]}, {timed['threads']} threads", fontsize=9
    )
    for method, (label, colour) in METHODS.items():
        place, marker = ([100 * step_share(run, method)], [value(run, method, "kl")]), "D" if method == OURS else "o"
        right.plot(*place, label=label, color=colour, marker=marker, linestyle="", markersize=8)
    _finish(right, "bytes requested by a layer's step, % of dense attention's", "KL from dense, nats")
    right.set(xlim=(1.5, 80), ylim=(0.004, 0.5))
    _ticks(right, {n: str(n) for n in (2, 5, 10, 20, 50)}, (0.01, 0.02, 0.05, 0.1, 0.2))
    of = f"{run.config['context']:,} tokens, {100 * run.config['budgets'][0]:g} % selected"
    right.set_title(f"{NAMES[run.config['model']]}, English, {of}", fontsize=9)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
    return figure


def lengths(results: pathlib.Path) -> Figure:
    """Draw quality against the length of the context, for two models."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for axes, name in zip(panels, MODELS, strict=True):
        run = stored(results, name)
        rows: list[dict[str, Any]] = run["rows"]
        found = reach(rows)
        for method, (label, colour, style) in REACHES.items():
            places = sorted((n, kl(own)) for n, own in found.get(method, {}).items())
            if places:
                at = zip(*places, strict=True)
                axes.plot(*at, label=label, color=colour, linestyle=style, marker="o", markersize=4)
        axes.axvline(4096, color="#bbbbbb", linewidth=1, zorder=0)
        _finish(axes, "context, tokens", "")
        axes.set_title(NAMES[run["model"]])
        at_lengths = {n: f"{n // 1024}K" for n in sorted({row["length"] for row in rows})}
        _ticks(axes, at_lengths, (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5))
    panels[0].set_ylabel("KL from dense, nats")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle("Hashers made from contexts of 4,096 tokens (line), 2 % of the tokens read", fontsize=10)
    return figure


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _ticks(axes: Axes, x: dict[int, str], y: tuple[float, ...]) -> None:
    axes.set_xticks(list(x), list(x.values()))
    axes.set_yticks(y, [f"{number:g}" for number in y])


FIGURES = {"overview": (overview, ("qwen15", "answers")), "reach": (lengths, ("reach_smol", "reach_qwen"))}
"""By name: what draws a figure, and the stored results that it shows."""


def path_of(name: str) -> pathlib.Path:
    return RESULTS.parent / "figures" / f"{name}.png"


def digest(name: str, results: pathlib.Path = RESULTS) -> str:
    """Return a digest of what a figure shows."""
    found = b"".join((results / f"{one}.json").read_bytes() for one in FIGURES[name][1])
    return hashlib.sha256(found).hexdigest()[:16]


def is_stale(name: str) -> bool:
    """Whether a figure is missing, or was drawn from other results."""
    if not path_of(name).is_file():
        return True
    with Image.open(path_of(name)) as image:
        return image.info.get("Description") != digest(name)


def png(name: str) -> bytes:
    """Draw a figure as PNG with its digest."""
    buffer = io.BytesIO()
    FIGURES[name][0](RESULTS).savefig(buffer, dpi=110, format="png", metadata={"Description": digest(name)})
    return buffer.getvalue()
