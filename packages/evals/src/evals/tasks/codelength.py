"""The length of untrained LSH that equals a learned hash: the paper's "5x shorter"."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hashtrain import Hasher, HasherConfig
from hashtrain.evaluation.metrics import Quality
from rich.console import Console
from sparse_decode import HashSelector, QueryHeadHasher

from evals.commands import CodelengthCommand
from evals.documents import TokenDocument
from evals.methods import LoadedMethod, load_methods, without_hasher
from evals.metrics import Estimate, bootstrap, resampled_means
from evals.report import AT, sentences
from evals.result import Result, Row
from evals.setup import Ready, Sample, drawn_rows, each_document, finish, prepare, require_cells, rows_of
from evals.tasks.iou import Cell, heads_measured, measure


def run(command: CodelengthCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""
    ready = prepare(command, "codelength", console)
    lsh = [untrained(ready, bits, command.seed) for bits in command.bits]
    learned = [method for method in ready.methods if method.selector]
    learned += further(command.more_hashers, command.methods, learned, ready.model.config)
    identities = {method.name: method.identity for method in learned}
    settings = {**ready.settings, "method_identities": identities}
    ready = replace(ready, methods=[*lsh, *learned], settings=settings)
    budget = command.budgets[0]
    heads_of = heads_measured(command)
    cells = [Cell(method.name, budget, heads) for heads in heads_of for method in ready.methods]

    def compute(number: int, document: TokenDocument, step: Callable[[str], None]) -> Sample:
        positions = drawn_rows(command, command.rows, number)
        found = measure(ready.model, document.ids, positions, ready.methods, command.budgets, command.always, heads_of)
        step("selections")
        sparse = command.always.sparse(ready.shape.num_layers)

        def means(by_layer: dict[str, Any]) -> dict[str, float]:
            return {m: float(np.mean([by_layer[m][layer] for layer in sparse])) for m in Quality._fields}

        return {"cells": [{**cell._asdict(), **means(found[cell])} for cell in cells]}

    check = partial(require_cells, cells=cells, numbers=Quality._fields)
    samples = each_document(command, ready, console, 1, check, compute)
    result = finish(command, ready, list(_rows(command, ready, cells, samples)), console)
    for sentence in sentences(result):
        console.print(sentence, highlight=False)
    return result


def further(
    folders: Sequence[Path], names: Sequence[str], loaded: Sequence[LoadedMethod], model_config: Any
) -> list[LoadedMethod]:
    """Load hashers of other code lengths, named after their length: `planes at 64`.

    Raises: ValueError if a folder has none of the names, or repeats a name and length.
    """
    taken = {(method.name, length_of(method)) for method in loaded}
    found: list[LoadedMethod] = []
    for folder in folders:
        lacking = without_hasher(names, folder)
        present = [name for name in names if name not in lacking]
        if not present:
            raise ValueError(
                f"no hasher of {', '.join(names)} in {folder}: train them with `uv run hashtrain --bits N --only "
                f"{' '.join(names)} --out {folder}`"
            )
        for method in load_methods(present, folder, model_config):
            bits = length_of(method)
            if (method.name, bits) in taken:
                raise ValueError(
                    f"each hasher must have its own length, got {method.name} of {bits} bits in {folder} again; leave "
                    "that folder out of --more-hashers"
                )
            taken.add((method.name, bits))
            found.append(replace(method, name=f"{method.name}{AT}{bits}"))
    return found


def length_of(method: LoadedMethod) -> int:
    """Return the code bits of one hash function; `paper` has one per query head."""
    if not isinstance(method.selector, HashSelector) or not isinstance(method.selector.hasher, Hasher):
        raise TypeError(f"{method.name} makes no codes")
    return method.selector.hasher.config.bits


def untrained(ready: Ready, bits: int, seed: int) -> LoadedMethod:
    """Create LSH with this code length for the model."""
    hasher = Hasher(HasherConfig("lsh", ready.shape, bits=bits), seed)
    selectors = HashSelector(hasher), HashSelector(QueryHeadHasher(hasher))
    return LoadedMethod(f"lsh-{bits}", "lsh", bits, f"lsh-{bits}-{seed}", *selectors)


def equal_length(bits: np.ndarray, iou: np.ndarray, target: float) -> float:
    """Return the bits at which a curve reaches a target, by linear interpolation in log bits, clamped to its ends.

    Args:
        bits, iou: [lengths], both ascending; dips of the curve are levelled.
    """
    return float(2 ** np.interp(target, np.maximum.accumulate(iou), np.log2(bits)))


def _rows(command: CodelengthCommand, ready: Ready, cells: list[Cell], samples: list[Sample]) -> Iterator[Row]:
    row = rows_of(command, ready, "rows", len(samples))
    by_bits = np.array(sorted(command.bits))
    bits = {method.name: length_of(method) for method in ready.methods}
    for heads in heads_measured(command):
        where = {"kv_head": "one set per KV head", "query_head": "one set per query head"}[heads]
        at = {"where": where, "budget": command.budgets[0], "rule": "visible", "density": None, "heads": heads}
        index = {cell.method: i for i, cell in enumerate(cells) if cell.heads == heads}
        values = {
            name: np.array([[s["cells"][i][m] for m in Quality._fields] for s in samples]) for name, i in index.items()
        }
        curve = [f"lsh-{bits}" for bits in by_bits]
        for name, found in values.items():
            for metric, estimate in zip(Quality._fields, bootstrap(found, command.seed), strict=True):
                yield row(name, metric, estimate, **at)
            if name in curve:
                continue
            columns = np.stack([*(values[other][:, 0] for other in curve), found[:, 0]], axis=1)
            value = equal_length(by_bits, columns.mean(0)[:-1], columns.mean(0)[-1])
            low = high = None
            if len(samples) > 1:
                drawn = [equal_length(by_bits, line[:-1], line[-1]) for line in resampled_means(columns, command.seed)]
                low, high = (float(edge) for edge in np.percentile(drawn, [2.5, 97.5]))
            yield row(name, "equal_lsh_bits", Estimate(value, low, high), **at)
            edges = (None if edge is None else edge / bits[name] for edge in (low, high))
            yield row(name, "times_shorter", Estimate(value / bits[name], *edges), **at)
