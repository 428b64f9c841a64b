"""Compare greedy continuations of held-out text with those of dense attention, after a dense prefill.

Or the answers that `evals longbench` has stored, task by task, so that no model runs (the paper's table 4 and figure
11).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from evals.documents import TokenDocument
from evals.methods import DENSE
from evals.metrics import bootstrap
from evals.results import Result, Row, as_written, read_json, read_result
from evals.runner import RunFolder, environment_of
from evals.setup import Ready, Sample, each_document, finish, mean_density, prepare, require_cells, rows_of, store
from evals.tasks.answers import Cell, continue_greedily, methods_of, to_text
from evals.tasks.benchmark import means_of_tasks
from evals.tasks.fidelity_settings import FidelityCommand
from evals.text import common_prefix, edit_similarity, rouge_l

METRICS = ("rouge_l", "edit_similarity", "prefix")
_OF_TEXT = {"rouge_l": rouge_l, "edit_similarity": edit_similarity}


def run(command: FidelityCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""
    if command.from_run is not None:
        return of_stored(command, command.from_run, console)
    ready = prepare(command, "fidelity", console)
    cells = [Cell(m.name, budget) for budget in command.budgets for m in ready.methods if m.selector]
    methods = methods_of(ready)

    def compute(number: int, document: TokenDocument, step: Callable[[str], None]) -> Sample:
        prompt = document.ids[: command.context - command.new_tokens]

        def written(cell: Cell) -> tuple[list[int], str, float]:
            how = methods[cell.method], cell.budget, command.always
            ids, density = continue_greedily(ready.model, prompt, command.new_tokens, *how)
            step(cell.method)
            return ids.tolist(), to_text(ready.tokenizer, ids), density

        dense_ids, dense, _ = written(Cell(DENSE, None))
        found = []
        for cell in cells:
            ids, text, density = written(cell)
            scores = rouge_l(dense, text), edit_similarity(dense, text), common_prefix(dense_ids, ids)
            named = dict(zip(METRICS, scores, strict=True))
            found.append({**cell._asdict(), "text": text, "density": density, **named})
        return {"dense": dense, "cells": found}

    check = partial(require_cells, cells=cells, numbers=(*METRICS, "density"))
    samples = each_document(command, ready, console, 1 + len(cells), check, compute)
    return finish(command, ready, list(_rows(command, ready, cells, samples)), console)


def _rows(command: FidelityCommand, ready: Ready, cells: list[Cell], samples: list[Sample]) -> Iterator[Row]:
    row = rows_of(command, ready, "decode", len(samples))
    for i, cell in enumerate(cells):
        found = [sample["cells"][i] for sample in samples]
        estimates = bootstrap([[one[name] for name in METRICS] for one in found], command.seed)
        for name, estimate in zip(METRICS, estimates, strict=True):
            yield row(cell.method, name, estimate, budget=cell.budget, rule="visible", density=mean_density(samples, i))


def of_stored(command: FidelityCommand, run: Path, console: Console) -> Result:
    """Compare the answers of a finished run of a benchmark. Raises: ValueError if the folder holds none."""
    source = read_result(run)
    paths = sorted((run / "samples").glob("*.json"))
    with as_written(str(run)):
        found = [cell for path in paths for cell in read_json(path, "rerun the command that made it")["cells"]]
        answered = [cell for cell in found if cell["texts"]]
    if not answered:
        raise ValueError(f"{run} holds no answers: expected a run of longbench, got one of {source.config['task']}")
    with as_written(str(run)):
        rows = [*_stored_rows(command, source, answered)]
        rows += means_of_tasks(rows)
    settings = {**source.config, "task": "fidelity", "compared": source.config["task"], "seed": command.seed}
    RunFolder(command.out, settings).renew(environment_of(run))
    return store(command.out, Result(settings, source.environment, rows), console)


def _stored_rows(command: FidelityCommand, source: Result, cells: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield each metric's mean over the answers of one task, for each method and budget."""
    dense = {cell["task"]: cell["texts"] for cell in cells if cell["method"] == DENSE}
    for cell in (cell for cell in cells if cell["method"] != DENSE):
        pairs = list(zip(dense[cell["task"]], cell["texts"], strict=True))
        at = {"where": cell["task"], "method": cell["method"], "budget": cell["budget"]}
        like = next(row for row in source.rows if all(getattr(row, name) == value for name, value in at.items()))
        values = [[measure(*pair) for measure in _OF_TEXT.values()] for pair in pairs]
        errors = np.std(values, axis=0, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else [None] * len(_OF_TEXT)
        for name, estimate, error in zip(_OF_TEXT, bootstrap(values, command.seed), errors, strict=True):
            shown = {"value": estimate.mean, "low": estimate.low, "high": estimate.high, "n": len(pairs)}
            yield replace(like, task="fidelity", metric=name, stderr=None if error is None else float(error), **shown)
