"""Tables of sparse-decode's README on features that are leaving: with the last of them, this file goes."""

import pathlib

from evals.tables import Grid, to_markdown

from readme_tables.stored import stored


def shortlist(results: pathlib.Path) -> str:
    found = stored(results, "shortlist")
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


def exact(results: pathlib.Path) -> str:
    lines = []
    for row in stored(results, "exact")["summary"]:
        counts = f"{row['context']:,}", str(row["k"]), f"{row['prompts']} x {row['tokens'] // row['prompts']}"
        made = f"{100 * row['acceptance']:.1f} %", f"{row['tokens_per_check']:.2f}"
        apart = f"within {row['largest_ulp']:g} ulp" if row["largest_ulp"] else "exact ties"
        differ = f"{row['differ']} ({apart})" if row["differ"] else "none"
        lines.append([row["dtype"], *counts, *made, differ])
    title = "Differences between the dense model's logits are in units in the last place (ulp) of its dtype"
    header = ["type", "context", "drafted", "prompts x tokens", "accepted", "tokens a check", "tokens that differ"]
    return to_markdown(Grid(title, header, [lines]))
