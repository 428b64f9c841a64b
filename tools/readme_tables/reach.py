"""The tables of quality against length, of hashers made from contexts of one length (`tools/measure_reach.py`)."""

import math
import pathlib
from typing import Any

from evals.tables import Grid, to_markdown

from readme_tables.stored import stored

MODELS = {"reach_smol": "SmolLM2-135M-Instruct", "reach_qwen": "Qwen2.5-Coder-0.5B-Instruct"}
"""Stored runs, and the models' names."""


def rows_of(run: dict[str, Any]) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Return the rows of a stored run, one a text, by method and length."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for row in run["rows"]:
        found.setdefault(row["method"], {}).setdefault(row["length"], []).append(row)
    return found


def kl(rows: list[dict[str, Any]]) -> float:
    """Return the mean KL from dense over texts."""
    return sum(row["kl"] for row in rows) / len(rows)


def described(method: str) -> tuple[str, str]:
    """Split a method as stored into what its hasher was made from, in words, and its name."""
    folder, _, name = method.rpartition("/")
    context, _, moved = folder.partition("-")
    if not folder:
        return "", name
    if not context.isdigit():  # runs/ask/MODEL
        return "as `examples/ask.py` makes it", name
    return f"{int(context):,} tokens, {'at offsets' if moved else 'at 0'}", name


def table(name: str, results: pathlib.Path) -> str:
    """Return the table of one stored run: KL and perplexity by length."""
    run = stored(results, name)
    found = rows_of(run)
    lengths = sorted({row["length"] for row in run["rows"]})
    sections = [[_line(method, by_length, lengths)] for method, by_length in found.items()]
    texts = ", ".join(f"{len({r['text'] for r in run['rows'] if r['length'] == n})} at {n:,}" for n in lengths)
    title = (
        f"Mean KL from dense in nats, in brackets perplexity against dense, {MODELS[name]}, by tokens of context; "
        f"{run['fraction']:.0%} of the visible tokens, last {run['scored']} rows after a dense prompt, no layer "
        f"set to dense, besides those that a hasher names; texts: {texts}"
    )
    return to_markdown(Grid(title, ["method", "made from contexts of", *(f"{n:,}" for n in lengths)], sections))


def _line(method: str, by_length: dict[int, list[dict[str, Any]]], lengths: list[int]) -> list[str]:
    made, name = described(method)
    return [name, made, *(_cell(by_length[n]) if n in by_length else "" for n in lengths)]


def _cell(rows: list[dict[str, Any]]) -> str:
    excess = math.exp(sum(row["nll"] - row["dense"] for row in rows) / len(rows)) - 1
    return f"{kl(rows):.4f} ({100 * excess:+.1f} %)"
