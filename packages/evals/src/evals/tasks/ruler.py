"""Synthetic exercises (`evals.synthetic`), by kind and length."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from evals.commands import RulerCommand
from evals.documents import TokenDocument
from evals.metrics import bootstrap
from evals.result import Result, Row
from evals.runner import finite
from evals.setup import Ready, Sample, each_document, finish, prepare, rows_of
from evals.synthetic import Exercise, exercise
from evals.tasks.answers import Answer, Cell, as_document, cells_of, methods_of, read_answer

METRICS = ("exact", "tokens", "log_prob")


def run(command: RulerCommand, console: Console) -> Result:
    """Run the task and store its results below `command.out`.

    Raises: ValueError or OSError with one sentence, before anything is written, if the input cannot be used.
    """
    made: list[list[Exercise]] = []

    def make(tokenizer: PreTrainedTokenizerBase) -> list[TokenDocument]:
        for trial in range(command.documents):
            seed = command.seed * 1_000_003 + trial
            made.append([exercise(kind, tokenizer, n, None, seed) for kind in command.kinds for n in command.lengths])
        return [as_document(f"trial {i + 1}", found) for i, found in enumerate(made)]

    ready = prepare(command, "ruler-synthetic", console, make)
    cells, methods = cells_of(command, ready), methods_of(ready)

    def compute(number: int, document: TokenDocument, step: Callable[[str], None]) -> Sample:
        found = []
        for cell in cells:
            for x in made[number]:
                answer = read_answer(ready.model, x, methods[cell.method], cell.budget, command.always)
                found.append({**cell._asdict(), "kind": x.kind, "length": x.length, **answer._asdict()})
            step(cell.method)
        return {"answers": found}

    def check(sample: Sample) -> None:
        wanted = [[*cell, x.kind, x.length] for cell in cells for x in made[0]]
        if [[a[name] for name in (*Cell._fields, "kind", "length")] for a in sample["answers"]] != wanted:
            raise ValueError("its methods, budgets, kinds or lengths are not those of the run")
        for answer in sample["answers"]:
            for name in Answer._fields:
                finite(answer[name])

    samples = each_document(command, ready, console, len(cells), check, compute)
    return finish(command, ready, list(_rows(command, ready, samples)), console)


def _rows(command: RulerCommand, ready: Ready, samples: list[Sample]) -> Iterator[Row]:
    row = rows_of(command, ready, "decode", len(samples))
    for i, first in enumerate(samples[0]["answers"]):
        found = [sample["answers"][i] for sample in samples]
        at = {"where": f"{first['kind']}, {first['length']} tokens", "budget": first["budget"], "rule": "visible"}
        at["density"] = sum(answer["density"] for answer in found) / len(found)
        estimates = bootstrap([[answer[name] for name in METRICS] for answer in found], command.seed)
        for name, estimate in zip(METRICS, estimates, strict=True):
            yield row(first["method"], name, estimate, **at)
