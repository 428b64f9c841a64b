"""Tables of docs/gpu.md, of what was measured on a GPU."""

import pathlib
from typing import Any

from evals.tables import Grid, to_markdown

from readme_tables.stored import stored

KERNELS = ("hash_tokens", "list_candidates", "select_64", "add_token", "gather", "combine")


def _found(results: pathlib.Path) -> tuple[dict[str, Any], str]:
    """Return the stored results, and the machine in words."""
    found = stored(results, "gpu_h200")
    machine = found["machine"]
    return found, f"{machine['device']}, torch {machine['torch']}, {machine['date']}"


def _at(rows: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    return {(row["batch"], row["tokens"]): row for row in rows}


def _name(batch: int, tokens: int) -> str:
    return f"{tokens:,}" if batch == 1 else f"{batch} x {tokens:,}"


def layers(results: pathlib.Path) -> str:
    """Return the table of a layer's attention by context, beside the first measurement and the prediction."""
    found, machine = _found(results)
    now, before, predicted = (
        _at(rows) for rows in (found["layers"], found["before"]["layers"], found["predicted_before_the_day"])
    )
    lines = []
    for at in sorted(now):
        row = now[at]
        other = [f"{rows[at]['whole_us']:.0f}" if at in rows else "" for rows in (before, predicted)]
        lines.append(
            [_name(*at), f"{row['dense_us']:.0f}", f"{row['whole_us']:.0f}", f"{row['speedup']:.1f} x", *other]
        )
    header = ["context", "dense", "sparse", "faster", "sparse when first run", "predicted the day before"]
    return to_markdown(Grid(f"Microseconds of one layer's attention, {machine}", header, [lines]))


def kernels(results: pathlib.Path) -> str:
    """Return the table of the kernels' times."""
    found, machine = _found(results)
    lines = [
        [_name(batch, tokens), *(f"{row['us'][kernel][0]:.1f}" for kernel in KERNELS)]
        for (batch, tokens), row in sorted(_at(found["kernels"]).items())
    ]
    header = ["context", *(f"`{kernel}`" for kernel in KERNELS)]
    return to_markdown(Grid(f"Microseconds of each kernel of a step, {machine}", header, [lines]))


def search(results: pathlib.Path) -> str:
    """Return the table of searches and packing of 512K keys."""
    found, machine = _found(results)
    lines = []
    for row, before in zip(found["paper"], found["before"]["paper"], strict=True):
        times = [f"{row[name]:.0f} ({before[name]:.0f})" for name in ("search_1_us", "search_6_us", "pack_all_us")]
        lines.append([f"{row['rows']} x {row['tokens']:,}", *times])
    header = ["rows x keys", "search, 1 plane", "search, 6 planes", "pack all keys"]
    title = f"Microseconds for the best 2 % of 128-bit codes (when first run), {machine}"
    return to_markdown(Grid(title, header, [lines]))


def decode(results: pathlib.Path) -> str:
    """Return the table of a whole model's steps."""
    found, machine = _found(results)
    rows = {(row["batch"], row["tokens"], row["sparse"]): row for row in found["decode"]}
    lines = []
    for batch, tokens in sorted({at[:2] for at in rows}):
        dense, sparse = rows[batch, tokens, False], rows[batch, tokens, True]
        graph = [f"{row['graph_ms']:.1f}" for row in (dense, sparse)]
        eager = [f"{row['eager_ms']:.0f}" for row in (dense, sparse)]
        lines.append([_name(batch, tokens), *graph, f"{dense['graph_ms'] / sparse['graph_ms']:.2f} x", *eager])
    header = ["context", "dense, captured", "sparse, captured", "faster", "dense, queued", "sparse, queued"]
    return to_markdown(Grid(f"Milliseconds of a decode step, {machine}", header, [lines]))
