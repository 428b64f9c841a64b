"""Draw the figure of README.md from the results stored in docs/results.

    uv run tools/draw_overview.py           # write docs/figures/overview.png
    uv run tools/draw_overview.py --check   # change nothing; exit 1 if the results have changed since it was drawn

The figure carries the digest of what it was drawn from: pixels differ between versions of fonts and libraries.
"""

import argparse
import hashlib
import io
import json
import pathlib
import sys

import matplotlib.pyplot as plt
from evals.figures import COLOURS
from evals.result import Result, read_json, rows_from_json, stated
from hashtrain.atomic import replace
from matplotlib.axes import Axes
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
OUT = ROOT / "docs" / "figures" / "overview.png"
INPUTS = ("ppl.json", "sparse_attention.json", "sparse_model_decode.json")
# Names as drawn; a line each, in the order of the legend.
METHODS = {
    "lsh": "lsh: random hashing",
    "paper": "paper: its MLP",
    "planes": "planes",
    "transform": "transform",
    "transform+remainder": "transform+remainder",
    "oracle": "oracle: exact top-k",
}


def digest(results: pathlib.Path = RESULTS) -> str:
    """Name what the figure depends on."""
    sha = hashlib.sha256()
    for name in INPUTS:
        sha.update((results / name).read_bytes())
    return sha.hexdigest()[:16]


def drawn_from(figure: pathlib.Path) -> str | None:
    """Read which digest a figure carries."""
    with Image.open(figure) as image:
        return image.info.get("Description")


def _quality(axes: Axes, result: Result) -> None:
    rule = result.config["rules"][0]
    for method, label in METHODS.items():
        rows = [r for r in result.rows if r.method == method and r.metric == "perplexity_ratio" and r.rule == rule]
        points = sorted((100 * (r.budget or 0), 100 * (r.value - 1)) for r in rows)
        deployed = method.endswith("remainder")
        axes.plot(
            *zip(*points, strict=True),
            label=label,
            marker="o",
            color="#009e73" if deployed else COLOURS.get(method),
            linestyle="--" if method == "oracle" else "-",
            linewidth=2.6 if deployed else 1.5,
        )
    axes.set(xscale="log", yscale="log", xlabel="tokens attended to, % of those visible")
    axes.set_ylabel("perplexity above dense, %")
    axes.set_xticks([0.5, 1, 2], ["0.5", "1", "2"])
    axes.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title("Quality: 128-bit codes, demo model, context 4,096", fontsize=10)


def _speed(axes: Axes, attention: dict, model: dict) -> None:
    for kind, colour in (("float32", "#0072b2"), ("bfloat16", "#56b4e9")):
        points = sorted((row["n"], row["ratio"]) for row in attention["rows"] if row["dtype"] == kind)
        axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=f"attention, {kind}")
    points = sorted((row["n"], row["ratio"]) for row in model["rows"] if row["batch"] == 1)
    axes.plot(
        *zip(*points, strict=True), marker="s", color="#d55e00", label=f"model of {model['layers']} layers, bfloat16"
    )
    axes.axhline(1, color="black", linewidth=0.8)
    lengths = sorted({row["n"] for row in attention["rows"]})
    axes.set(xscale="log", yscale="log", xlabel="context, tokens")
    axes.set_ylabel("dense time / sparse time")
    axes.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
    axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 0.03))
    axes.set_title("Speed: decode step on one CPU core, 2 % selected", fontsize=10)


def draw(results: pathlib.Path = RESULTS) -> bytes:
    """Return the figure as PNG."""
    data = read_json(results / "ppl.json", "store a run")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    _quality(left, Result(stated(data["config"]), data["environment"], rows_from_json(data)))
    _speed(right, *(json.loads((results / name).read_text()) for name in INPUTS[1:]))
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png", metadata={"Description": digest(results)})
    plt.close(figure)
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the figure is stale")
    if parser.parse_args().check:
        if not OUT.is_file() or drawn_from(OUT) != digest():
            sys.exit(f"{OUT.name} was drawn from other results; run `uv run tools/draw_overview.py`")
        return
    image = draw()

    def write(temporary: pathlib.Path) -> None:
        temporary.write_bytes(image)

    replace(OUT, write)


if __name__ == "__main__":
    main()
