"""Compare greedy continuations of held-out text with those of dense attention, after a dense prefill."""

from collections.abc import Callable, Iterator

from rich.console import Console

from evals.documents import TokenDocument
from evals.methods import DENSE
from evals.metrics import mean_estimates
from evals.results import Result, Row
from evals.setup import Ready, Sample, each_document, finish, load_with_documents, mean_density, rows_of
from evals.tasks.answers import Cell, continue_greedily, methods_of, to_text
from evals.tasks.settings import FidelityCommand
from evals.text import common_prefix, edit_similarity, rouge_l

METRICS = ("rouge_l", "edit_similarity", "prefix")


def run(command: FidelityCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""
    ready = load_with_documents(command, "fidelity", console)
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

    samples = each_document(command, ready, console, 1 + len(cells), compute)
    return finish(command, ready, list(_rows(command, ready, cells, samples)), console)


def _rows(command: FidelityCommand, ready: Ready, cells: list[Cell], samples: list[Sample]) -> Iterator[Row]:
    row = rows_of(command, ready, "decode", len(samples))
    for i, cell in enumerate(cells):
        found = [sample["cells"][i] for sample in samples]
        estimates = mean_estimates([[one[name] for name in METRICS] for one in found], 0, 1)
        for name, estimate in zip(METRICS, estimates, strict=True):
            yield row(cell.method, name, estimate, budget=cell.budget, rule="visible", density=mean_density(samples, i))
