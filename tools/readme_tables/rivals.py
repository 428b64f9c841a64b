"""Differences between our methods and the rivals, paired over documents."""

import pathlib
from collections.abc import Iterator

from evals.grid import Grid, percent, to_markdown
from evals.methods import OURS
from evals.metrics import Estimate
from evals.report import protocol
from evals.tasks.ppl import AS

from readme_tables.stored import load, stored

METRICS = ("kl", "nll")
HEADER = ["ours less the rival's", "KL from dense, nats", "loss, nats a token"]


def differences(results: pathlib.Path) -> Iterator[tuple[str, dict[str, Estimate]]]:
    """Yield each comparison's label, and the mean difference of each metric with its interval."""
    found: dict[str, dict[str, Estimate]] = {}
    for entry in stored(results / "differences.json")["table 2"]:
        (ours, own), (rival, theirs) = entry["a"], entry["b"]
        label = f"{ours} at {percent(own)}, {rival} at {percent(theirs)}"
        found.setdefault(label, {})[entry["metric"]] = Estimate(entry["mean"], entry["low"], entry["high"])
    for row in load(results / "magicpig.json").rows:
        if row.method not in OURS or row.against is None or not row.against.startswith("magicpig"):
            continue
        matched = row.rule == AS + row.against
        if matched or (row.rule == "visible" and row.against == "magicpig-bare"):
            at = f"as many tokens as {row.against} took" if matched else f"{percent(row.budget or 0)}, {row.against}"
            found.setdefault(f"{row.method} at {at}", {})[row.metric] = Estimate(row.value, row.low, row.high)
    yield from found.items()


def rivals(results: pathlib.Path) -> str:
    """Return the table of differences, one line per comparison."""
    lines = [[label, *(_cell(values[name]) for name in METRICS)] for label, values in differences(results)]
    config = load(results / "magicpig.json").config
    title = (
        f"Mean difference over {config['documents']} held-out contexts of {config['context']:,} tokens, model "
        f"`{config['model']}`, every row sparse, {protocol(config)} [95 % paired bootstrap "
        "interval]; below zero is better for ours"
    )
    return to_markdown(Grid(title, HEADER, [lines]))


def _cell(found: Estimate) -> str:
    interval = "" if found.low is None or found.high is None else f" [{found.low:+.3f}, {found.high:+.3f}]"
    return f"{found.mean:+.3f}{interval}"
