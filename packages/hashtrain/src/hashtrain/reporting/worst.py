"""What a run's metrics say of the worst rows: heads that fail, repairs, and layers that stay dense."""

from collections.abc import Collection, Sequence
from typing import Any

Metrics = dict[str, Any]
_NAMED = 8


def dense_of(metrics: Metrics, name: str) -> list[int]:
    """List the layers that stay dense with a hasher, from the metrics of a run of any version."""
    found = metrics["hashers"][name]
    if "dense_layers" in found:
        return found["dense_layers"]
    first = metrics.get("dense_layers", 0)  # older runs stored what was asked for, for all hashers
    return list(range(first)) if first else found.get("cost", {}).get("dense", [])


FIGURES = "IoU / attention mass / in the worst head: its 5th percentile / rows that find less than half of it"
"""What `figures` returns."""


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
    parts = [f"{shown['iou']:.3f}", f"{shown['mass']:.3f}"]
    if all("lost_by_head" in at for at in layers):  # older stored results lack it
        parts += [f"{min(at['low'] for at in layers):.2f}", share(max(max(at["lost_by_head"]) for at in layers))]
    return " / ".join(parts) + " (dense)" * (layer in dense)


def share(part: float) -> str:
    """Return a small share as a percentage with two digits."""
    return f"{100 * part:.2g} %"


def failing_heads(layers: Sequence[Metrics], failing: Sequence[Sequence[int]], most: int = _NAMED) -> str:
    """Name heads that fail, each with the 5th percentile of its rows' mass and its share of lost rows."""
    named = [
        f"layer {layer} head {head} "
        f"({layers[layer]['low_by_head'][head]:.2f}, {share(layers[layer]['lost_by_head'][head])})"
        for layer, head in failing[:most]
    ]
    return ", ".join(named) + " ..." * (len(failing) > most)


def repaired_heads(repaired: dict[str, dict[str, str]]) -> str:
    """Name repaired heads with what each got."""
    named = ((layer, head, what) for layer, heads in repaired.items() for head, what in heads.items())
    return ", ".join(f"layer {layer} head {head} ({what})" for layer, head, what in named)


def worst_lines(metrics: Metrics) -> list[str]:
    """Summarise for each hasher how bad its worst rows are, which heads fail or were repaired, and dense layers."""
    lines: list[str] = []
    for name, result in metrics["hashers"].items():
        layers, dense = result["kv_head"]["layers"], dense_of(metrics, name)
        sparse = [number for number in range(len(layers)) if number not in dense]
        low, layer = min((layers[number]["low"], number) for number in sparse)
        lost = max(part for number in sparse for part in layers[number]["lost_by_head"])
        line = (
            f"{name}: in the worst head (layer {layer}) 5 % of the rows find at most {low:.2f} of the attention mass. "
        )
        most = f"No head has more than {share(lost)} of rows that find" if lost else "No row finds"
        line += f"{most} less than half of it."
        if failed := result["failing"]:
            heads = failing_heads(layers, failed)
            line += f" Heads that fail, with the 5th percentile of the mass and the share of such rows: {heads}."
        if repaired := result.get("repaired"):
            line += f" Repaired: {repaired_heads(repaired)}."
        if cost := result.get("cost"):
            dense, bare = (", ".join(map(str, cost[kind])) or "none" for kind in ("dense", "bare"))
            line += f" If every layer is sparse, the next token's distribution moves by {cost['all']:.3f} nats (KL)."
            line += f" Layers to keep dense: {dense}; without a remainder: {bare}."
        lines.append(line)
    return lines
