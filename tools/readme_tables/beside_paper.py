"""The paper's own values beside ours: perplexity over dense's in its tables 2, 3, 10 and 11, and its code length."""

import pathlib
from typing import NamedTuple

from evals import paper
from evals.grid import Grid, to_markdown

from readme_tables.stored import load


class Beside(NamedTuple):
    """One row: a line of one of the paper's tables, and the stored run and method that measure the same."""

    table: str
    line: str
    """First cell of the paper's line."""
    run: str
    method: str
    budget: float


ROWS = (
    Beside("table 2", "oracle, 2 %", "exact_quest", "oracle", 0.02),
    Beside("table 2", "Quest, 3.1 %", "exact_quest", "quest", 0.031),
    Beside("table 2", "Spotlight, 5 %", "exact_quest", "paper-exact", 0.05),
    Beside("table 2", "Spotlight, 2 %", "exact_quest", "paper-exact", 0.02),
    Beside("table 3", "Spotlight, 2 %", "exact_quest", "paper-exact", 0.02),
    Beside("table 3", "Spotlight, sink and local", "exact_ends", "paper-exact", 0.02),
    Beside("table 3", "sink and local alone", "exact_no_retrieval", "recent", 0.0001),
    Beside("table 10", "reconstruction", "order_ppl", "paper-exact-mse", 0.02),
    Beside("table 10", "ranking", "order_ppl", "paper-exact", 0.02),
    Beside("table 11", "down-projection, 16 x", "exact_down_proj", "down-proj-exact", 0.02),
    Beside("table 11", "hashing", "exact_down_proj", "paper-exact", 0.02),
)
SHORTER = 5.0
"""How many times as long an LSH code must be, in the paper, to find as much as its learned one."""
_DENSE = {"table 10": "table 2", "table 11": "table 2"}
"""Tables that do not repeat the perplexity of dense attention, and the one that has it."""
_APART = 2.0
"""Two costs disagree if one is more than this many times the other."""


def papers_cost(table: str, line: str) -> float:
    """Return the paper's perplexity of LLaMA3-8B over dense's, minus 1, on its first text. Raises: KeyError."""
    return _printed(table)[line] / _printed(_DENSE.get(table, table))["dense"] - 1


def our_cost(results: pathlib.Path, row: Beside) -> float:
    """Return our perplexity over dense's, minus 1."""
    found = load(results / f"{row.run}.json")
    at = {"method": row.method, "budget": row.budget, "against": None}
    return found.one(metric="perplexity_ratio", **at).value - 1


def times_shorter(results: pathlib.Path) -> dict[str, float]:
    """Return how many times as long untrained LSH must be to find as much as 128 bits of `paper`, by kind of heads."""
    rows = load(results / "codelength.json").select(method="paper", metric="times_shorter")
    return {str(row.heads): row.value for row in rows}


def table(results: pathlib.Path) -> str:
    """Return the table: each of the paper's lines that a stored run measures."""
    lines = []
    for row in ROWS:
        config = load(results / f"{row.run}.json").config
        costs = our_cost(results, row), papers_cost(row.table, row.line)
        lines.append([f"{row.table}: {row.line}", str(config["model"]), *(f"{100 * cost:+.1f} %" for cost in costs)])
    title = (
        "Perplexity over dense attention's, in the paper's protocol: here (demo model: 8 contexts of 4,096 tokens; "
        "smollm2: 6 of 2,048, three layers sparse) and in the paper (LLaMA3-8B, PG19)"
    )
    return to_markdown(Grid(title, ["the paper's table and line", "model here", "here", "the paper"], [lines]))


def sentences(results: pathlib.Path) -> str:
    """Return a sentence for each line of which one cost is more than twice the other, and one on the code length."""
    said = []
    for row in ROWS:
        ours, theirs = our_cost(results, row), papers_cost(row.table, row.line)
        if disagree(ours, theirs):
            more = "more" if ours > theirs else "less"
            shown = f"{100 * ours:+.1f} % here, {100 * theirs:+.1f} % there"
            said.append(f"- {row.table[0].upper()}{row.table[1:]}, {row.line}: costs {more} here ({shown}).")
    found = times_shorter(results)
    said.append(
        f"- Code length: 128 bits of `paper` find as much as untrained LSH of {found['kv_head']:.1f} times as many "
        f"bits with one selection per KV head, {found['query_head']:.1f} times with one per query head; the paper says "
        f"{SHORTER:g} times."
    )
    return "\n".join(said)


def disagree(ours: float, theirs: float) -> bool:
    """Whether one cost is more than twice the other; below a tenth of a percent, all costs are alike."""
    low, high = sorted((max(ours, 0.001), max(theirs, 0.001)))
    return high > _APART * low


def _printed(table: str) -> dict[str, float]:
    """Return the first column of numbers of one of the paper's tables, by line."""
    item = next(item for item in paper.ITEMS if item.name == table)
    assert item.paper is not None
    lines = [line for section in item.paper.sections for line in section]
    return {line[0]: float(line[1]) for line in lines if line[1] != "NaN"}
