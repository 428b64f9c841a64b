"""Tables of sparse-decode: times of attention, of decode steps and of prefill."""

import pathlib
from typing import Any

from evals.grid import Grid, to_markdown

from readme_tables.stored import stored


def sparse_attention(results: pathlib.Path) -> str:
    found = stored(results / "sparse_attention.json")
    title = (
        f"Milliseconds of processor time of a step of one layer, {found['query_heads']} query heads, "
        f"{found['kv_heads']} KV heads of {found['head_dim']}, {100 * found['fraction']:g} % selected, "
        f"{found['threads']} thread, {found['processor']}, {found['date']}, median of {found['repeats']}"
    )
    lines = [
        [
            f"{row['n']:,}",
            row["dtype"],
            f"{row['sparse_ms']:.1f}",
            *(f"{taken:.1f}" for taken in row["dense_ms"].values()),
            f"{row['ratio']:.1f}",
        ]
        for row in found["rows"]
    ]
    header = ["tokens", "type", "sparse", *found["rows"][0]["dense_ms"], "fastest dense / sparse"]
    return to_markdown(Grid(title, header, [lines]))


def shortlist(results: pathlib.Path) -> str:
    found = stored(results / "shortlist.json")
    n, planes = found["rows"][0]["n"], found["rows"][0]["planes"]
    title = (
        f"Search of one row for the best {100 * found['fraction']:g} % of {n:,} keys, {planes} planes of 128 bits, one "
        f"thread, {found['processor']}, {found['date']}: all keys in full, and shortlists of so many times as many; "
        f"ratios are medians"
    )
    lines = []
    for row in found["rows"]:
        line = [str(row["layer"]), f"{row['microseconds']['None']:.0f} us"]
        for times, ratio in row["ratio"].items():
            line += [f"{ratio:.2f} x", f"{100 * row['found'][times]:.1f} %"]
        lines.append(line)
    asked = [name for times in found["rows"][0]["ratio"] for name in (f"{times} x: faster", "of its selection")]
    return to_markdown(Grid(title, ["layer", "in full", *asked], [lines]))


def _model_title(found: dict[str, Any]) -> str:
    return (
        f"Qwen2.5-0.5B's shape, {found['layers']} of 24 layers, bfloat16, {100 * found['fraction']:g} % selected, "
        f"{found['threads']} thread, {found['processor']}, {found['date']}"
    )


def model_decode(results: pathlib.Path) -> str:
    found = stored(results / "sparse_model_decode.json")
    title = f"Milliseconds of processor time of a decode step. {_model_title(found)}, median of {found['repeats']}"
    lines = [
        [
            f"{row['n']:,} x {row['batch']}",
            *(f"{row[name]:,.0f}" for name in ("sparse_ms", "dense_ms", "shipped_ms")),
            f"{row['ratio']:.2f}",
            f"{row['allowed']:.2f}",
            f"{100 * row['share']:.0f} %",
        ]
        for row in found["rows"]
    ]
    header = [
        "tokens",
        "sparse",
        "fastest dense",
        f"Hugging Face's, best of {found['rows'][0]['shipped_steps']}",
        "dense / sparse",
        "bytes allow",
        "share",
    ]
    return to_markdown(Grid(title, header, [lines]))


def break_even(results: pathlib.Path) -> str:
    found = stored(results / "sparse_model_break_even.json")
    title = f"Times of a decode step over those of the model as it is. {_model_title(found)}, {found['repeats']} steps"
    lines = [
        [f"{row['n']:,}", f"{row['dense_ms']:.1f} ms", *(_quartiles(row[name]) for name in ("sparse", "attached"))]
        for row in found["rows"]
    ]
    header = ["tokens", "as it is", "sparse", "attached, dense below the break-even"]
    return to_markdown(Grid(title, header, [lines]))


def prefill(results: pathlib.Path) -> str:
    found = stored(results / "sparse_model_prefill.json")
    title = f"Seconds of processor time of prefill. {_model_title(found)}, median of {found['repeats']}"
    lines = [
        [f"{row['n']:,}", *(f"{1e-3 * row[name]:.1f}" for name in ("dense_ms", "attached_ms")), _quartiles(row)]
        for row in found["rows"]
    ]
    return to_markdown(Grid(title, ["tokens", "as it is", "attached", "ratio"], [lines]))


def _quartiles(ratio: dict[str, float]) -> str:
    return f"{ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
