"""Tables of sparse-decode: times of attention, of decode steps and of prefill."""

import pathlib
from typing import Any

from evals.grid import Grid, to_markdown

from readme_tables.stored import stored


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


def exact(results: pathlib.Path) -> str:
    lines = []
    for row in stored(results / "exact.json")["summary"]:
        counts = f"{row['context']:,}", str(row["k"]), f"{row['prompts']} x {row['tokens'] // row['prompts']}"
        made = f"{100 * row['acceptance']:.1f} %", f"{row['tokens_per_check']:.2f}"
        apart = f"within {row['largest_ulp']:g} ulp" if row["largest_ulp"] else "exact ties"
        differ = f"{row['differ']} ({apart})" if row["differ"] else "none"
        lines.append([row["dtype"], *counts, *made, differ])
    title = "Differences between the dense model's logits are in units in the last place (ulp) of its dtype"
    header = ["type", "context", "drafted", "prompts x tokens", "accepted", "tokens a check", "tokens that differ"]
    return to_markdown(Grid(title, header, [lines]))


def beside_llama_cpp(results: pathlib.Path) -> str:
    both = [stored(results / f"{name}.json") for name in ("llama_cpp", "llama_cpp_qwen")]
    found = both[0]
    built = f" (built for {', '.join(name for name in found['llama_cpp_uses'] if name.startswith('AVX'))})"
    versions = ", ".join(
        f"{name} {number}{built * (name == 'xllamacpp')}" for name, number in found["versions"].items()
    )
    title = (
        f"Milliseconds a decode step, 16-bit weights and caches, 2 % selected, {found['threads']} threads, "
        f"{found['processor']}, {found['date']}, {versions}; median of rounds in turns; "
        "`about`: extrapolated by a line through llama.cpp's shorter contexts"
    )
    sections = [[_beside_llama_cpp(run["model"], row) for row in run["rows"]] for run in both]
    header = ["model, tokens", "ours", "llama.cpp", "transformers", "llama.cpp / ours", "transformers / ours"]
    return to_markdown(Grid(title, header, sections))


def _beside_llama_cpp(model: str, row: dict[str, Any]) -> list[str]:
    steps = row["steps"]
    taken = [steps[name]["ms"] for name in ("ours", "llama.cpp", "transformers")]
    about = "about " if steps["llama.cpp"].get("predicted") else ""
    ratios = [f"{other / taken[0]:.2f} x" for other in taken[1:]]
    plain = [f"{ms:,.1f}" for ms in taken]
    return [f"{model}, {row['tokens']:,}", plain[0], about + plain[1], plain[2], about + ratios[0], ratios[1]]
