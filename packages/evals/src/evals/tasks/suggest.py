"""Find the smallest budget that meets a target on the user's text and model, by bisection over a grid of budgets."""

from collections.abc import Callable

import torch
from rich.console import Console

from evals.documents import TokenDocument
from evals.methods import LoadedMethod
from evals.metrics import Estimate, bootstrap
from evals.result import Result, Row
from evals.runner import RunFolder, environment_of, finite
from evals.setup import Ready, Sample, drawn_rows, prepare, rows_of, store
from evals.study import SuggestCommand
from evals.tasks import iou, ppl

GRID = (*(round(0.0025 * 2 ** (i / 4), 5) for i in range(35)), 1.0)
"""Budgets from a quarter of a percent, each 19 % above the previous one."""


def run(command: SuggestCommand, console: Console) -> Result:
    """Find the budget and store the measurements below `command.out`.

    Raises: ValueError or OSError with one sentence, before anything is written, if the input cannot be used.
    """
    ready = prepare(command, "suggest", console)
    (method,) = [found for found in ready.methods if found.selector]
    folder = RunFolder(command.out, ready.settings, str(ready.model.device))
    everything = TokenDocument("all documents", torch.cat([document.ids for document in ready.documents]))
    probed: dict[float, Estimate] = {}

    def meets(index: int) -> bool:
        budget = GRID[index]

        def check(sample: Sample) -> None:
            if sample["budget"] != budget or len(sample["values"]) != len(ready.documents):
                raise ValueError("it is of another budget or other documents")
            for value in sample["values"]:
                finite(value)

        def compute() -> Sample:
            values = [_value(command, ready, method, budget, i) for i in range(len(ready.documents))]
            return {"budget": budget, "values": values}

        sample, _ = folder.sample(index, everything, check, compute)
        (probed[budget],) = bootstrap([[value] for value in sample["values"]], command.seed)
        found, good = probed[budget], satisfied(probed[budget], command)
        verdict = "meets" if good else "misses"
        console.print(f"budget {100 * budget:.3g} %: {command.metric} {found.mean:.4g}, {verdict} the target")
        return good

    chosen = GRID[smallest(meets, len(GRID))]
    row = rows_of(command, ready, "rows" if command.metric == "mass" else command.phase, len(ready.documents))
    rows: list[Row] = []
    for budget, found in sorted(probed.items()):
        where = "suggested" if budget == chosen else "tried"
        rows.append(row(method.name, command.metric, found, budget=budget, rule="visible", density=None, where=where))
    return store(command.out, Result(ready.settings, environment_of(command.out), rows), console)


def smallest(meets: Callable[[int], bool], count: int) -> int:
    """Return the first index that meets the target, by bisection; the last one, untried, if no other does."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle + 1
    if high == count - 1:
        meets(high)  # measure it too
    return high


def satisfied(found: Estimate, command: SuggestCommand) -> bool:
    """Whether the whole 95 % interval meets the target; without an interval, the mean."""
    if command.mass is not None:
        return (found.mean if found.low is None else found.low) >= command.mass
    assert command.kl is not None
    return (found.mean if found.high is None else found.high) <= command.kl


def _value(command: SuggestCommand, ready: Ready, method: LoadedMethod, budget: float, number: int) -> float:
    """Measure one document: its KL from dense, or the attention mass of its selections relative to the oracle's."""
    ids = ready.documents[number].ids
    if command.metric == "kl":
        cells, methods, dense = [ppl.Cell(method.name, "visible", budget)], {method.name: method}, command.always
        return ppl.measure(ready.model, ids, cells, methods, dense, phase=command.phase)["cells"][0]["kl"]
    positions = drawn_rows(command, command.rows, number)
    heads = "query_head" if command.heads == "query" or (command.heads is None and method.by_query_head) else "kv_head"
    ((_, found),) = iou.measure(ready.model, ids, positions, [method], (budget,), command.always, (heads,)).items()
    sparse = [found["mass"][layer] for layer in command.always.sparse(len(found["mass"]))]
    return sum(map(sum, sparse)) / sum(map(len, sparse))
