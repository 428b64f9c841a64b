"""Synthetic exercises (`evals.synthetic`), by kind and length."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from evals.commands import RulerCommand
from evals.documents import TokenDocument
from evals.result import Result
from evals.setup import Sample, each_document, finish, prepare
from evals.synthetic import Exercise, exercise
from evals.tasks.answers import Answer, answer_rows, as_document, cells_of, methods_of, read_answer, require_answers

METRICS = ("exact", "tokens", "log_prob")


def run(command: RulerCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""
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
        require_answers(sample, cells, made[0], ("kind", "length"), Answer._fields)

    samples = each_document(command, ready, console, len(cells), check, compute)
    rows = answer_rows(command, ready, samples, METRICS, lambda x: f"{x['kind']}, {x['length']} tokens")
    return finish(command, ready, list(rows), console)
