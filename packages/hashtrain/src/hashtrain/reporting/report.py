"""A run's report: the table on the terminal, the figures, and each hasher's card."""

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from hashtrain.config import HasherConfig
from hashtrain.evaluation.evaluate import LEAST_LOW, MOST_LOST
from hashtrain.files.atomic import replace
from hashtrain.reporting.worst import FIGURES, Metrics, dense_of, failing_heads, figures, repaired_heads, share

_COLUMNS = 6
HEADS = {"kv_head": "per KV head", "query_head": "per query head"}


def quality_table(metrics: Metrics, heads: str) -> Table:
    """Lay out `hashtrain.reporting.worst.figures` by layer and hasher, with those of all sparse layers."""
    rows = [*range(metrics["layers"]), None]
    cells = {
        name: [figures(found[heads], dense_of(metrics, name), layer) for layer in rows]
        for name, found in metrics["hashers"].items()
    }
    table = Table(title=f"{FIGURES}; held out, {HEADS[heads]}")
    if len(cells) > _COLUMNS:  # too many columns for a terminal: show only the means
        for title in ("hasher", "mean of the sparse layers"):
            table.add_column(title)
        for name, line in cells.items():
            table.add_row(name, line[-1])
        return table
    for title in ("layer", *cells):
        table.add_column(title, justify="right")
    for layer in range(metrics["layers"]):
        table.add_row(str(layer), *(line[layer] for line in cells.values()))
    table.add_section()
    table.add_row("mean", *(line[-1] for line in cells.values()))
    return table


def _style(number: int) -> dict[str, Any]:
    """Distinguish up to forty curves: ten colours, solid, dashed, dotted, dash-dotted."""
    return {"color": f"C{number % 10}", "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}


def draw(metrics: Metrics, path: Path) -> None:
    """Draw training curves (left) and per-layer IoU (right) to a PNG."""
    figure = Figure(figsize=(12.5, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (name, result) in enumerate(metrics["hashers"].items()):
        layers, style = range(metrics["layers"]), _style(number)
        right.plot(layers, [q["iou"] for q in result["kv_head"]["layers"]], marker="o", label=name, **style)
        if curves := result["losses"]:
            mean = [sum(column) / len(column) for column in zip(*curves, strict=True)]
            left.plot(_smooth(mean, 20), **style)
    left.set(xlabel="step", ylabel="loss, mean of layers", yscale="log", title="Training")
    right.set(xlabel="layer", ylabel="IoU per KV head, held out", ylim=(0, 1), title=f"Top {metrics['fraction']:.1%}")
    right.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside right center")
    _save(figure, path)


def draw_by_head(metrics: Metrics, path: Path, what: str, label: str) -> None:
    """Draw a heat map of `what`, a list by head, per layer and KV head for each hasher."""
    names = list(metrics["hashers"])
    across = min(len(names), 5)
    down = math.ceil(len(names) / across)
    size = (1.5 + 2.2 * across, down * (1.2 + 0.35 * metrics["layers"]) + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        by_layer = [layer[what] for layer in metrics["hashers"][name]["kv_head"]["layers"]]
        heads = max(map(len, by_layer))  # layers may differ in heads
        filled = [row + [math.nan] * (heads - len(row)) for row in by_layer]
        axis.imshow(filled, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set(title=name, xlabel="KV head", xticks=range(heads))
        for row, found in enumerate(by_layer):
            for head, iou in enumerate(found):
                color = "black" if iou > 0.6 else "white"
                axis.text(head, row, f"{iou:.2f}", ha="center", va="center", fontsize=8, color=color)
    for axis in axes[:, 0]:
        axis.set_ylabel("layer")
    figure.colorbar(axes[0, 0].images[0], ax=axes.ravel().tolist(), label=label)
    _save(figure, path)


def draw_bits(metrics: Metrics, path: Path) -> None:
    """Draw how the codes use their bits: the share of ones of each bit, and the correlation of bits by layer."""
    figure = Figure(figsize=(12.5, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (name, result) in enumerate(metrics["hashers"].items()):
        layers, style = result["bits"]["layers"], _style(number)
        if not any(layers):
            continue
        dense = dense_of(metrics, name)
        ones = sorted(part for n, layer in enumerate(layers) if n not in dense for part in layer["ones"])
        left.plot([(i + 0.5) / len(ones) for i in range(len(ones))], ones, **style)
        correlation = [layer["correlation"] for layer in layers]
        right.plot(range(metrics["layers"]), correlation, marker="o", label=name, **style)
    left.axhline(0.5, color="0.7", linewidth=1, zorder=0)
    left.set(xlabel="bits of the sparse layers, in order", ylabel="share of ones", title="Balance (0.5 is best)")
    left.set_ylim(0, 1)
    right.set(xlabel="layer", ylabel="mean |correlation| of two bits", title="Redundancy (0 is best)")
    right.set_ylim(bottom=0)
    right.xaxis.get_major_locator().set_params(integer=True)
    if right.lines:
        figure.legend(loc="outside right center")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    replace(path, lambda temporary: figure.savefig(temporary, dpi=120, format="png"))


def _smooth(values: list[float], width: int) -> list[float]:
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - width + 1) : i + 1])]


def card(config: HasherConfig, name: str, metrics: Metrics) -> str:
    """Write a hasher's README: its purpose, its training, and how well it selects."""
    result = metrics["hashers"][name]
    rows = ""
    parts = (result[part]["layers"] for part in ("kv_head", "query_head", "remainder"))
    for layer, (kv, q, rest) in enumerate(zip(*parts, strict=True)):
        low, lost = min(kv["low_by_head"]), max(kv["lost_by_head"])
        worst = f"{low:.2f} ({kv['low_by_head'].index(low)}) | {share(lost)} ({kv['lost_by_head'].index(lost)})"
        rows += f"| {layer} | {kv['iou']:.3f} | {kv['mass']:.3f} | {worst} | {q['iou']:.3f} | {q['mass']:.3f} "
        rows += f"| {rest['share']:.3f} | {rest['error']:.3f} |\n"
    base = f"base_model: {config.base_model}\n" if "/" in config.base_model else ""
    return f"""---
library_name: hashtrain
license: apache-2.0
{base}tags: [sparse-attention, kv-cache, hashing]
---
# Hasher `{name}` for `{config.base_model}`

{_made(config, result, metrics)}

| layer | IoU, KV head | mass, KV head | low | lost | IoU, query head | mass, query head | left out | its error |
|---|---|---|---|---|---|---|---|---|
{rows}
"Low" is the 5th percentile of the mass over rows, and "lost" the share of rows that find less than half of the mass of
an exact selection, both of the layer's worst KV head, in parentheses. A head fails if its low is below {LEAST_LOW} or
its lost above {share(MOST_LOST)}. "Left out" is the share of the softmax that the selection misses (per query
head, mean over rows), which the remainder estimates; its error is the root mean square over rows.

    from hashtrain import Hasher
    hasher = Hasher.from_pretrained("this/folder")
"""


def _made(config: HasherConfig, result: Metrics, metrics: Metrics) -> str:
    """Return the card's sentences on how a hasher was trained and evaluated."""
    shape = config.shape
    planes = config.planes if config.variant in ("planes", "transform") else 1
    budget = f"{metrics['fraction']:.1%} of the visible tokens"
    return (
        f"Variant `{config.variant}`, {config.bits} bits, {planes} query plane(s). Base model: {shape.num_layers} "
        f"layers, {shape.num_query_heads} query and {shape.num_kv_heads} KV heads of {shape.head_dim}.\n"
        f"Made by hashtrain {metrics['version']}: {metrics['steps']} steps per layer, {metrics['contexts']} contexts "
        f"of {metrics['context']} tokens ({metrics['corpus']}).\n"
        f"For contexts of {'any length' if config.reach is None else f'up to {config.reach} tokens'}.\n"
        f"Evaluated on {metrics['held_out']} held-out contexts at a budget of {budget}, of which the first "
        f"{metrics['sink']} and the last {metrics['recent']} are always read.\n"
        f"Layers that stay dense: {', '.join(map(str, config.dense_layers)) or 'none'}.\n"
        f"Heads that fail on the held-out rows, with their low and lost: "
        f"{failing_heads(result['kv_head']['layers'], result['failing'], len(result['failing'])) or 'none'}.\n"
        f"Repaired heads, with what each got: {repaired_heads(result['repaired']) or 'none'}."
    )
