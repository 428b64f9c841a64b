"""The table of what the worst rows miss, from `tools/what_is_missed.py`."""

import pathlib
from typing import Any

from evals.grid import Grid, percent, to_markdown

from readme_tables.headline import SECOND_MODEL
from readme_tables.stored import stored

_MODELS = {"smollm2": SECOND_MODEL, "demo": "demo model"}
_FIRST = ("layer", "head", "low", "missed")


def missed(results: pathlib.Path) -> str:
    """Return the table: for each run all heads together, weighed by what they miss, and the head that misses most."""
    found = stored(results / "missed.json")
    causes = found["columns"][len(_FIRST) :]
    sections = [_lines(run, len(causes)) for run in found["runs"]]
    rows = sorted({(run["rows"], run["context"]) for run in found["runs"]})
    title = (
        "What the worst 5 % of the rows miss of the exact selection's attention mass, and the share of that by cause "
        "(a token may have several); in parentheses, the share of such tokens in the exact selection. Drawn rows: "
        + ", ".join(f"{count} of {context:,} tokens" for count, context in rows)
    )
    header = ["model, text, hasher", "5th percentile", "missed", *causes]
    return to_markdown(Grid(title, header, sections))


def _lines(run: dict[str, Any], causes: int) -> list[list[str]]:
    heads, name = run["heads"], _MODELS.get(run["model"], run["model"])
    weights = [head[3] for head in heads]
    whole = sum(weights) or 1.0
    means = [sum(w * head[4 + n] for w, head in zip(weights, heads, strict=True)) / whole for n in range(causes)]
    usual = [f" ({_whole(share)})" for share in run["usual"]] + [""] * (causes - len(run["usual"]))
    worst = max(heads, key=lambda head: head[3])
    low = min(head[2] for head in heads)
    shares = [f"{_whole(mean)}{of}" for mean, of in zip(means, usual, strict=True)]
    every = [f"{name}, {run['text']}, {run['hasher']}", f"{low:.2f}", percent(whole / len(heads)), *shares]
    one = [f"its head {worst[0]}.{worst[1]}", f"{worst[2]:.2f}", percent(worst[3]), *map(_whole, worst[4:])]
    return [every, one]


def _whole(share: float) -> str:
    return f"{100 * share:.0f} %"
