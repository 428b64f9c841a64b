"""Compare two runs, or two methods, paired over the same documents."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from evals.grid import Grid, amount
from evals.machine import HARDWARE
from evals.metrics import Estimate, bootstrap
from evals.result import Result, as_written, read_json, read_result

METRICS = {
    "ppl": ("kl", "nll"),
    "iou": ("iou", "recall", "mass"),
    "output-error": ("error",),
    "fidelity": ("rouge_l", "edit_similarity", "prefix"),
    "needle": ("rouge_l", "recall", "substring", "log_prob"),
    "ruler-synthetic": ("exact", "tokens", "log_prob"),
}
"""Numbers per sample of each task, by which two runs are paired."""
_BENCHMARKS = ("longbench", "ruler", "fewshot")
"""Tasks whose samples hold one number per item for every metric that has them."""
_PLACES = ("rule", "heads", "kind", "length", "depth")
_FREE = ("methods", "budgets", "tokens", "documents", "method_identities", "versions")
"""Settings in which comparable runs may differ; the table mentions different versions."""

Place = tuple[tuple[str, Any], ...]
Values = dict[tuple[str, float | None, Place], dict[str, list[float]]]


def compare(
    first: Path, second: Path, methods: tuple[str | None, str | None], budgets: tuple[float | None, float | None]
) -> tuple[list[dict[str, Any]], Grid]:
    """Subtract the second run from the first, document by document.

    Args:
        methods, budgets: of the first and of the second run; None keeps all. If both are given, these two are compared;
            everything else is compared with its counterpart of the same name.
    Returns: one entry per pair and metric, with the mean difference and its 95 % interval; and its table.
    Raises: ValueError if the runs have different protocols or documents, or nothing can be paired.
    """
    results = [read_result(folder) for folder in (first, second)]
    _require_one_protocol(first, second, *results)
    samples = [_samples(folder) for folder in (first, second)]
    n = min(map(len, samples))
    for i in range(n):
        names = [(s[i].get("document"), s[i].get("tokens")) for s in samples]
        if names[0] != names[1]:
            raise ValueError(f"the runs must be of the same documents, got {names[0]} and {names[1]} as number {i}")
    with as_written(f"{first} or {second}"):
        a, b = (_values(result, found[:n]) for result, found in zip(results, samples, strict=True))
        entries = list(_differences(a, b, methods, budgets, results[0].config["seed"]))
        table = _grid(entries, n, results) if entries else None
    if table is None:
        raise ValueError(f"no method and budget of {first} pairs with one of {second}; name them with --method-a, ...")
    return entries, table


def _require_one_protocol(first: Path, second: Path, a: Result, b: Result) -> None:
    comparable = (*METRICS, *_BENCHMARKS)
    if a.config["task"] not in comparable:
        raise ValueError(f"runs of {', '.join(comparable)} can be compared, got one of {a.config['task']}")
    if bool(a.config.get("tokens")) != bool(b.config.get("tokens")):
        raise ValueError(
            f"{first} and {second} have different protocols: one has budgets in tokens, the other in shares; rerun one "
            "of them with the other's kind"
        )
    for name in sorted((a.config.keys() | b.config.keys()) - set(_FREE)):
        if a.config.get(name) != b.config.get(name):
            raise ValueError(
                f"{first} and {second} have different protocols: {name} is {a.config.get(name)} and "
                f"{b.config.get(name)}; rerun one of them with the other's settings"
            )


def _samples(folder: Path) -> list[dict[str, Any]]:
    remedy = "delete that file and rerun the command"
    found = [read_json(path, remedy) for path in sorted((folder / "samples").glob("*.json"))]
    if not found:
        raise ValueError(f"{folder} has no samples; rerun the command")
    return found


def _values(result: Result, samples: list[dict[str, Any]]) -> Values:
    """Collect each metric's values, one per document."""
    found: Values = {}
    dense = {*range(result.config["dense_layers"]), *result.config["dense_at"]}
    for sample in samples:
        for cell in sample.get("cells", sample.get("answers", [])):
            places = ("task",) if result.config["task"] in _BENCHMARKS else _PLACES  # a benchmark run has one rule
            place = tuple((name, cell[name]) for name in places if name in cell)
            values = found.setdefault((cell["method"], cell["budget"], place), {})
            if result.config["task"] in _BENCHMARKS:
                values |= cell["values"]
                continue
            for metric in METRICS[result.config["task"]]:
                values.setdefault(metric, []).append(_mean(cell[metric], dense))
    return found


def _mean(value: Any, dense: set[int]) -> float:
    """Return a number as it is, or the mean of a list over the sparse layers."""
    found = [x for layer, x in enumerate(value) if layer not in dense] if isinstance(value, list) else value
    return float(np.mean(found))


def _differences(
    a: Values, b: Values, methods: tuple[str | None, str | None], budgets: tuple[float | None, float | None], seed: int
) -> Iterator[dict[str, Any]]:
    for (method, budget, place), found in a.items():
        if methods[0] not in (None, method) or budgets[0] not in (None, budget):
            continue
        other_method = methods[1] or method
        other_budget = budget if budgets[1] is None else budgets[1]
        other = b.get((other_method, other_budget, place))
        if other is None or (found is other):
            continue
        for metric, mine in found.items():
            if metric not in other:
                continue
            pairs = [[x - y] for x, y in zip(mine, other[metric], strict=True)]
            (estimate,) = bootstrap(pairs, seed)
            label = {"a": [method, budget], "b": [other_method, other_budget], "metric": metric, **dict(place)}
            yield {**label, **estimate._asdict()}


def _grid(entries: list[dict[str, Any]], n: int, results: list[Result]) -> Grid:
    result = results[0]
    metrics = list(dict.fromkeys(entry["metric"] for entry in entries))
    lines: dict[str, list[str]] = {}
    rule = "tokens" if result.config.get("tokens") else "visible"
    for entry in entries:
        budgets = ("" if budget is None else f" {amount(budget, rule)}" for _, budget in (entry["a"], entry["b"]))
        names = [method + words for (method, _), words in zip((entry["a"], entry["b"]), budgets, strict=True)]
        place = "".join(f", {name} {entry[name]}" for name in ("task", *_PLACES) if name in entry)
        line = lines.setdefault(f"{names[0]} - {names[1]}{place}", [""] * len(metrics))
        line[metrics.index(entry["metric"])] = _cell(Estimate(entry["mean"], entry["low"], entry["high"]))
    shared = "documents"
    if result.config["task"] in _BENCHMARKS:
        n, shared = len({entry["task"] for entry in entries}), "tasks, item by item"
    title = f"`{result.config['task']}`: mean difference over {n} shared {shared} [95 % paired bootstrap interval]"
    sections = [[[label, *cells] for label, cells in lines.items()]]
    return Grid(title, ["first - second", *metrics], sections, version_note(*results))


def version_note(first: Result, second: Result) -> str:
    """Return a note on the software that differs between two runs, or "": it may explain their difference."""
    a, b = (_software(result) for result in (first, second))
    differing = [f"{n} {a.get(n, 'not stored')} and {b.get(n, 'not stored')}" for n in a | b if a.get(n) != b.get(n)]
    return f"Note: the two runs were made by different versions: {', '.join(differing)}." if differing else ""


def _software(result: Result) -> dict[str, str]:
    """Return the versions from a run's settings, which apply to all its samples, and from its environment."""
    own = [part.split(" ") for part in result.config["versions"].split(", ")]
    found = {name: value for name, value in result.environment.items() if name not in HARDWARE}
    return found | dict(pair for pair in own if len(pair) == 2)


def _cell(x: Estimate) -> str:
    return f"{x.mean:+.4g}" + ("" if x.low is None or x.high is None else f" [{x.low:+.3g}, {x.high:+.3g}]")
