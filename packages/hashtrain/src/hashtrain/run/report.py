"""A run's report: the table and the sentences on the terminal, and each hasher's card."""

from collections.abc import Collection
from typing import Any

from rich.table import Table

from hashtrain.config import HasherConfig

Metrics = dict[str, Any]
_COLUMNS, _NAMED = 6, 8
_FIGURES = "IoU / attention mass / in the worst head: its 5th percentile / rows that find less than half of it"
_HEADS = {"kv_head": "per KV head", "query_head": "per query head"}


def quality_table(metrics: Metrics, heads: str) -> Table:
    """Lay out how well each hasher selects, by layer, and over its sparse layers."""
    rows = [*range(metrics["layers"]), None]
    cells = {
        name: [figures(found[heads], found["dense_layers"], layer) for layer in rows]
        for name, found in metrics["hashers"].items()
    }
    table = Table(title=f"{_FIGURES}; held out, {_HEADS[heads]}")
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


def figures(found: Metrics, dense: Collection[int], layer: int | None = None) -> str:
    """Return the IoU and mass of a layer, and of its worst head the 5th percentile of the mass and the lost rows.

    Args:
        found: a hasher's results for one kind of head.
        dense: its dense layers, marked as such.
        layer: None for the means over the layers that are not dense, with the worst head of all of them.
    """
    sparse = [number for number in range(len(found["layers"])) if number not in dense]
    layers = [found["layers"][number] for number in (sparse if layer is None else [layer])]
    shown = found["mean"] if layer is None else layers[0]
    worst = min(at["low"] for at in layers), max(max(at["lost_by_head"]) for at in layers)
    text = f"{shown['iou']:.3f} / {shown['mass']:.3f} / {worst[0]:.2f} / {percent(worst[1])}"
    return text + " (dense)" * (layer in dense)


def percent(part: float) -> str:
    """Return a small share as a percentage with two digits."""
    return f"{100 * part:.2g} %"


def sentences(metrics: Metrics) -> list[str]:
    """Say of each hasher which heads fail, which got other weights than the last, and which layers stay dense."""
    lines: list[str] = []
    for name, result in metrics["hashers"].items():
        layers, said = result["kv_head"]["layers"], list[str]()
        if failed := result["failing"]:
            of = ", ".join(
                f"layer {n} head {head} ({layers[n]['low_by_head'][head]:.2f}, "
                f"{percent(layers[n]['lost_by_head'][head])})"
                for n, head in failed[:_NAMED]
            )
            more = " ..." * (len(failed) > _NAMED)
            said.append(f"Heads that fail, with the 5th percentile of the mass and the share of such rows: {of}{more}.")
        if repaired := result["repaired"]:
            of = ", ".join(f"layer {n} head {h} ({what})" for n, heads in repaired.items() for h, what in heads.items())
            said.append(f"Repaired: {of}.")
        if cost := result.get("cost"):
            dense, bare = (", ".join(map(str, cost[kind])) or "none" for kind in ("dense", "bare"))
            said.append(
                f"If every layer is sparse, the next token's distribution moves by {cost['all']:.3f} nats (KL)."
            )
            said.append(f"Layers to keep dense: {dense}; without a remainder: {bare}.")
        lines += [f"{name}: {' '.join(said)}"] if said else []
    return lines


def card(config: HasherConfig, name: str, metrics: Metrics) -> str:
    """Write a hasher's README: what it was made from, and how well it selects."""
    result = metrics["hashers"][name]
    rows = "".join(
        f"| {layer} | {found['iou']:.3f} | {found['mass']:.3f} | {min(found['low_by_head']):.2f} "
        f"| {percent(max(found['lost_by_head']))} |\n"
        for layer, found in enumerate(result["kv_head"]["layers"])
    )
    base = f"base_model: {config.base_model}\n" if "/" in config.base_model else ""
    return f"""---
library_name: hashtrain
license: apache-2.0
{base}tags: [sparse-attention, kv-cache, hashing]
---
# Hasher `{name}` for `{config.base_model}`

Variant `{config.variant}`, {config.bits} bits, made by hashtrain {metrics["version"]}.
{metrics["steps"]} steps per layer, {metrics["contexts"]} contexts of {metrics["context"]} tokens ({metrics["corpus"]}).
For contexts of {"any length" if config.reach is None else f"up to {config.reach} tokens"}.
Layers that stay dense: {", ".join(map(str, config.dense_layers)) or "none"}.
Evaluated on {metrics["held_out"]} held-out contexts at a budget of {metrics["fraction"]:.1%} of the visible tokens:

| layer | IoU | attention mass | low | lost |
|---|---|---|---|---|
{rows}
All per KV head. "Low" is the 5th percentile of the mass over rows, and "lost" the share of rows that find less than
half of the mass of an exact selection, both of the layer's worst head.

    from hashtrain import Hasher
    hasher = Hasher.from_pretrained("this/folder")
"""
