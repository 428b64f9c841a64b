"""The tables of the attention output's error, and of what the worst rows miss (`tools/what_is_missed.py`)."""

import pathlib
from typing import Any

from evals.frontier import how_read_in_words
from evals.grid import Grid, percent, to_markdown
from evals.methods import REMAINDER
from evals.result import Result
from sparse_decode import Budget
from sparse_decode.costs.traffic import step_bytes

from readme_tables.headline import SECOND_MODEL
from readme_tables.quality import ALL_READ, HEAD_DIM
from readme_tables.stored import load, spread, stored

RUNS = {"demo model": ("errors_demo", "errors_demo_values"), SECOND_MODEL: ("errors_smol", "errors_smol_values")}
"""Stored runs by model: plain, and with a shortlist and fewer values."""


def errors(names: dict[str, tuple[str, ...]], results: pathlib.Path) -> str:
    """Return the table of stored runs, by model."""
    found = {subject: [load(results / f"{name}.json") for name in runs] for subject, runs in names.items()}
    sections = [[[subject, *line] for run in runs for line in _lines(run)] for subject, runs in found.items()]
    counts = ", ".join(f"{runs[0].config['documents']} contexts of {subject}" for subject, runs in found.items())
    title = (
        "Relative error of the attention output, mean over layers and over rows drawn from the last three quarters "
        f"of a context, with the inputs of dense attention in every layer; {counts}; bytes as in the table above, "
        "at the end of the context"
    )
    read = ("tokens read", "search and values", "bytes")
    header = ["model", "method", *read, "error [95 % interval]", "largest, in layer"]
    return to_markdown(Grid(title, header, sections))


def _lines(result: Result) -> list[list[str]]:
    """Return a line for each method and budget: name, settings, bytes, mean, and the worst layer."""
    config, found = result.config, [row for row in result.rows if row.metric == "error"]
    lines = []
    for whole in (row for row in found if row.layer is None):
        own = [
            row for row in found if row.layer is not None and (row.method, row.budget) == (whole.method, whole.budget)
        ]
        worst = max(own, key=lambda row: row.value)
        coded = whole.method not in ("oracle", "recent")
        shortlist, values = (config.get("shortlist"), config.get("values", 1.0)) if coded else (None, 1.0)
        assert whole.budget is not None  # every row of this task has one
        budget = Budget(whole.budget, shortlist=shortlist, values=values)
        share = step_bytes(config["context"], budget, HEAD_DIM, whole.bits or 0, whole.method.endswith(REMAINDER)).share
        how = how_read_in_words(budget) or ALL_READ if coded else ""
        shown = [f"{100 * share:.1f} %", spread(whole, ".4f"), f"{worst.value:.3f}, {worst.layer}"]
        lines.append([whole.method, f"{100 * whole.budget:g} %", how, *shown])
    return lines


_MODELS = {"smollm2": SECOND_MODEL, "demo": "demo model"}
_FIRST = ("layer", "head", "low", "missed")


def missed(results: pathlib.Path) -> str:
    """Return the table: for each run all heads together, weighed by what they miss, and the head that misses most."""
    found = stored(results / "missed.json")
    causes = found["columns"][len(_FIRST) :]
    sections = [_missed_lines(run, len(causes)) for run in found["runs"]]
    rows = sorted({(run["rows"], run["context"]) for run in found["runs"]})
    title = (
        "What the worst 5 % of the rows miss of the exact selection's attention mass, and the share of that by cause "
        "(a token may have several); in parentheses, the share of such tokens in the exact selection. Drawn rows: "
        + ", ".join(f"{count} of {context:,} tokens" for count, context in rows)
    )
    header = ["model, text, hasher", "5th percentile", "missed", *causes]
    return to_markdown(Grid(title, header, sections))


def _missed_lines(run: dict[str, Any], causes: int) -> list[list[str]]:
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
