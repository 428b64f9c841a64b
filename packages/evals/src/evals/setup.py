"""Shared setup of the tasks: load model, methods and documents; store rows, report and figure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from hashtrain.config import ModelShape
from hashtrain.data.offsets import longest_of
from hashtrain.demo import model_path
from hashtrain.device import device_for
from hashtrain.files.atomic import write_text
from hashtrain.models import load_model, require_vocabulary
from hashtrain.run.progress import tracking
from rich.console import Console
from sparse_decode.streaming import require_dtype
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evals.documents import TokenDocument, load_documents
from evals.figures import draw
from evals.methods import DENSE, LoadedMethod, load_methods
from evals.metrics import Estimate
from evals.results import Result, Row, rows_to_text, versions
from evals.runner import RunFolder, environment_of, model_identity
from evals.settings import MethodsCommand, TaskCommand
from evals.tables import grids, to_markdown, to_rich

Sample = dict[str, Any]


@dataclass(frozen=True)
class Ready:
    """Everything a task needs; nothing has been written yet."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    shape: ModelShape
    methods: list[LoadedMethod]
    documents: Sequence[Any]
    """`TokenDocument`s, or other objects with a name and a digest that a task measures."""
    settings: dict[str, Any]


def load_model_and_methods(command: MethodsCommand, task: str) -> Ready:
    """Load and check the model and the methods of a command; the caller adds the documents.

    Raises: ValueError or OSError with one sentence.
    """
    device = device_for(command.device, 0)
    dtype = None if command.dtype == "auto" else getattr(torch, command.dtype)
    require_dtype(device, dtype)
    model, tokenizer = load_model(model_path(command.model), dtype, str(device))
    require_dtype(device, model.dtype)  # what `auto` selected
    shape = ModelShape.of(model.config)
    if beyond := [layer for layer in command.dense_at if layer >= shape.num_layers]:
        raise ValueError(f"--dense-at takes layers 0 to {shape.num_layers - 1}, got {beyond[0]}")
    if not command.always.sparse(shape.num_layers):
        many = f"one of {shape.num_layers} layers sparse"
        raise ValueError(f"--dense-layers and --dense-at must leave {many}, got all of them; name fewer")
    methods = load_methods(command.methods, command.hashers, model.config)
    if not command.both_heads:
        methods = [method.for_heads(command.heads) for method in methods]
    identities = {method.name: method.identity for method in methods}
    settings = {**command.settings(task), "dtype": str(model.dtype).removeprefix("torch.")}
    settings |= {"model_identity": model_identity(model), "method_identities": identities}
    return Ready(model, tokenizer, shape, methods, [], settings)


def load_with_documents(
    command: MethodsCommand,
    task: str,
    console: Console,
    make: Callable[[PreTrainedTokenizerBase], list[TokenDocument]] | None = None,
    length: int = 0,
) -> Ready:
    """Load and check the inputs of a command.

    Args:
        make: creates the documents, of at most `length` tokens; by default they are the contexts of its texts.
    Raises: ValueError or OSError with one sentence.
    """
    ready = load_model_and_methods(command, task)
    longest = longest_of(ready.model.config)
    flag, length = ("--lengths", length) if make else ("--context", cast(TaskCommand, command).context)
    if longest is not None and length > longest:
        raise ValueError(f"{flag} must be at most the model's {longest} tokens, got {length}")
    if make is not None:
        documents = make(ready.tokenizer)
    else:
        given = cast(TaskCommand, command)
        cut = given.text, ready.tokenizer, length, command.documents, command.seed, given.within
        documents = load_documents(*cut)
    require_vocabulary(ready.model, *(document.ids for document in documents))
    if len(documents) < command.documents:
        console.print(f"{len(documents)} contexts of {length} tokens found; {command.documents} were requested")
    named = {"names": [document.name for document in documents]}
    return replace(ready, documents=documents, settings={**ready.settings, **named})


def rows_of(command: MethodsCommand, ready: Ready, phase: str, n: int) -> Callable[..., Row]:
    """Return a function that builds a row: `row(method, metric, estimate, budget=, rule=, density=, ...)`.

    Dense attention gets no budget, density 1 and the rule `dense`; further keywords are columns of `Row`.

    Args:
        phase: see `Row`; n: number of documents.
    """
    methods = {method.name: method for method in ready.methods}
    shared = {"task": ready.settings["task"], "dense_layers": command.dense_layers}
    shared |= {"phase": phase, "n": n, "seed": command.seed, "versions": versions()}

    def row(method: str, metric: str, estimate: Estimate, **more: Any) -> Row:
        found = methods.get(method)
        columns = {"variant": found.variant if found else method, "bits": found.bits if found else None}
        selector = found.selector if found else None  # MagicPIG has its own sink and local tokens
        if found is not None and found.heads is not None:
            more = {"heads": found.heads, **more}
        own = {"sink": getattr(selector, "sink", command.sink), "recent": getattr(selector, "local", command.recent)}
        columns |= dict.fromkeys(own, 0) if method == DENSE else own
        if method == DENSE:
            more |= {"budget": None, "rule": DENSE, "density": 1.0}
        value = {"value": estimate.mean, "low": estimate.low, "high": estimate.high}
        values: dict[str, Any] = {**shared, **columns, **value, **more}
        return Row(method=method, metric=metric, **values)

    return row


def each_document(
    command: MethodsCommand,
    ready: Ready,
    console: Console,
    steps: int,
    compute: Callable[[int, Any, Callable[[str], None]], Sample],
) -> list[Sample]:
    """Compute, or read back, one sample per document.

    Args:
        steps: how often `compute` calls its third argument, each time with what it is about to do.
    """
    folder = RunFolder(command.out, ready.settings, str(ready.model.device))
    samples: list[Sample] = []
    with tracking(console, steps * len(ready.documents)) as advance:
        for number, document in enumerate(ready.documents):

            def step(doing: str, name: str = document.name) -> None:
                advance(f"{name}: {doing}", 1)

            def now(number: int = number, document: Any = document) -> Sample:
                return compute(number, document, step)

            sample, computed = folder.sample(number, document, now)
            if not computed:
                advance(f"{document.name}: already stored", steps)
            samples.append(sample)
    return samples


def drawn_rows(command: TaskCommand, rows: int, number: int) -> Tensor:
    """Draw the query rows to measure in document `number`, beyond its first quarter, for all methods: [rows]."""
    generator = torch.Generator().manual_seed(command.seed * 1_000_003 + number)
    return torch.randint(command.context // 4, command.context, (rows,), generator=generator)


def mean_density(samples: Sequence[Sample], number: int) -> float:
    """Return the mean over samples of the density of one cell."""
    return sum(sample["cells"][number]["density"] for sample in samples) / len(samples)


def finish(command: MethodsCommand, ready: Ready, rows: list[Row], console: Console) -> Result:
    """Store the rows, the report and the figure; show the tables."""
    return store(command.out, Result(ready.settings, environment_of(command.out), rows), console)


def store(out: Path, result: Result, console: Console) -> Result:
    """Write the output of a finished run to its folder, and show the tables."""
    tables = grids(result)
    write_text(out / "report.md", "\n\n".join(map(to_markdown, tables)) + "\n")
    draw(result, out / "figure.png")
    write_text(out / "rows.json", rows_to_text(result.rows))  # last, because it marks the run as finished
    for grid in tables:
        console.print(to_rich(grid))
    return result
