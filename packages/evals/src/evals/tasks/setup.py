"""What every task begins and ends with: model, methods and documents in; rows, report and figure out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hashtrain.atomic import write_text
from hashtrain.config import ModelShape
from hashtrain.models import load_model
from hashtrain.progress import tracking
from rich.console import Console
from transformers import PreTrainedModel

from evals.documents import TokenDocument, load_documents
from evals.figures import draw
from evals.methods import DENSE, LoadedMethod, load_methods
from evals.metrics import Estimate
from evals.plan import TaskCommand
from evals.report import grids, to_markdown, to_rich
from evals.result import Result, Row, environment, rows_to_text, versions
from evals.runner import RunFolder, model_identity

Sample = dict[str, Any]


@dataclass(frozen=True)
class Ready:
    """Everything a task needs; nothing has been written so far."""

    model: PreTrainedModel
    shape: ModelShape
    methods: list[LoadedMethod]
    documents: list[TokenDocument]
    settings: dict[str, Any]


def prepare(command: TaskCommand, task: str, console: Console) -> Ready:
    """Load and check what the command names. Raises: ValueError or OSError with one sentence."""
    model, tokenizer = load_model(command.model_path)
    model.float()
    shape = ModelShape.of(model.config)
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and command.context > longest:
        raise ValueError(f"--context must be at most the model's {longest} tokens, got {command.context}")
    if command.dense_layers >= shape.num_layers:
        raise ValueError(f"--dense-layers must leave one of {shape.num_layers} layers, got {command.dense_layers}")
    methods = load_methods(command.methods, command.hashers, model.config)
    documents = load_documents(command.text, tokenizer, command.context, command.documents, command.seed)
    if len(documents) < command.documents:
        console.print(f"{len(documents)} contexts of {command.context} tokens found, {command.documents} asked for")
    identities = {method.name: method.identity for method in methods}
    settings = {**command.settings(task), "model_identity": model_identity(model), "method_identities": identities}
    return Ready(model, shape, methods, documents, settings)


def rows_of(command: TaskCommand, ready: Ready, phase: str, n: int) -> Callable[..., Row]:
    """Return what builds a row: `row(method, metric, estimate, budget=, rule=, density=, ...)`.

    Dense attention has no budget, all its tokens, and the rule `dense`; further keywords are columns of `Row`.

    Args:
        phase: see `Row`; n: documents.
    """
    methods = {method.name: method for method in ready.methods}
    shared = {"task": ready.settings["task"], "dense_layers": command.dense_layers, "sink": 0, "recent": 0}
    shared |= {"phase": phase, "n": n, "seed": command.seed, "versions": versions()}

    def row(method: str, metric: str, estimate: Estimate, **more: Any) -> Row:
        found = methods.get(method)
        facts = {"variant": found.variant if found else method, "bits": found.bits if found else None}
        if method == DENSE:
            more |= {"budget": None, "rule": DENSE, "density": 1.0}
        value = {"value": estimate.mean, "low": estimate.low, "high": estimate.high}
        return Row(method=method, metric=metric, **shared, **facts, **value, **more)

    return row


def each_document(
    command: TaskCommand,
    ready: Ready,
    console: Console,
    steps: int,
    check: Callable[[Sample], None],
    compute: Callable[[int, TokenDocument, Callable[[str], None]], Sample],
) -> list[Sample]:
    """Compute, or read back, one sample per document.

    Args:
        steps: how often `compute` calls its third argument, each time with what it is about to do.
        check: raises if a stored sample lacks something.
    """
    folder, samples = RunFolder(command.out, ready.settings), []
    with tracking(console, steps * len(ready.documents)) as advance:
        for number, document in enumerate(ready.documents):

            def step(doing: str, name: str = document.name) -> None:
                advance(f"{name}: {doing}", 1)

            def now(number: int = number, document: TokenDocument = document) -> Sample:
                return compute(number, document, step)

            sample, computed = folder.sample(number, document, check, now)
            if not computed:
                advance(f"{document.name}: stored before", steps)
            samples.append(sample)
    return samples


def finish(command: TaskCommand, ready: Ready, rows: list[Row], console: Console) -> Result:
    """Store the rows, the report and the figure; show the tables."""
    result = Result(ready.settings, environment(), rows)
    tables = grids(result)
    write_text(command.out / "report.md", "\n\n".join(map(to_markdown, tables)) + "\n")
    draw(result, command.out / "figure.png")
    write_text(command.out / "rows.json", rows_to_text(rows))
    for grid in tables:
        console.print(to_rich(grid))
    return result
