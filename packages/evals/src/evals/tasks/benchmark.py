"""LongBench, RULER and the few-shot tasks, through lm-evaluation-harness."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hashtrain.data.offsets import longest_of
from rich.console import Console

from evals.methods import DENSE
from evals.metrics import mean_estimates, normal
from evals.results import Result, Row
from evals.setup import Ready, Sample, each_document, finish, load_model_and_methods, rows_of
from evals.tasks.answers import methods_of
from evals.tasks.benchmark_settings import BenchmarkCommand, FewshotCommand, LongbenchCommand, RulerBenchmarkCommand

if TYPE_CHECKING:
    from evals.harness.load import BenchmarkTask
    from evals.harness.measure import Cell

NAMES = {LongbenchCommand: "longbench", RulerBenchmarkCommand: "ruler", FewshotCommand: "fewshot"}
PHASES = {"all": "everywhere", "continuation": "decode"}


def run(command: BenchmarkCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""
    if find_spec("lm_eval") is None:
        raise ValueError(
            "this task needs lm-evaluation-harness, which is not installed: in the checkout "
            "`uv pip install './packages/evals[lm-eval]'` or `uv sync --group lm-eval`"
        )
    from evals.harness.load import load_tasks
    from evals.harness.measure import measure

    ready = load_model_and_methods(command, NAMES[type(command)])
    _require_possible(command, ready)
    tasks = load_tasks(command)
    cells, methods = cells_of(command, ready), methods_of(ready)

    def compute(number: int, document: "BenchmarkTask", step: Callable[[str], None]) -> Sample:
        return measure(document, command, ready, cells, methods, step)

    samples = each_document(command, replace(ready, documents=tasks), console, len(cells), compute)
    rows = [*_rows(command, ready, samples)]
    return finish(command, ready, [*rows, *means_of_tasks(rows)], console)


def _require_possible(command: BenchmarkCommand, ready: Ready) -> None:
    """Raise ValueError if the tokenizer has no chat template, or comes with code that the harness would run, or if the
    model takes fewer tokens than asked for."""
    if command.chat_template and not getattr(ready.tokenizer, "chat_template", None):
        raise ValueError(f"the tokenizer of {command.model} has no chat template: leave --chat-template out")
    auto_maps = ready.tokenizer.init_kwargs.get("auto_map"), getattr(ready.model.config, "auto_map", None) or {}
    if isinstance(command, RulerBenchmarkCommand) and (auto_maps[0] or "AutoTokenizer" in auto_maps[1]):
        what = f"RULER's generators would run the code that comes with the tokenizer of {command.model}"
        raise ValueError(f"{what}: remove `auto_map` from its tokenizer_config.json and config.json")
    longest = longest_of(ready.model.config)
    if longest is not None and command.max_length is not None and command.max_length > longest:
        raise ValueError(f"--max-length must be at most the model's {longest} tokens, got {command.max_length}")
    room, asked = command.max_length or longest, max(getattr(command, "lengths", (0,)))
    if room is not None and asked > room:
        raise ValueError(f"--lengths must be at most the {room} tokens of the model or of --max-length, got {asked}")


def cells_of(command: BenchmarkCommand, ready: Ready) -> "list[Cell]":
    """Return dense attention, then every method at every budget."""
    rule, amounts = ("tokens", command.tokens) if command.tokens else ("visible", command.budgets)
    sparse = [(m.name, float(amount), rule) for amount in amounts for m in ready.methods if m.selector]
    return [(DENSE, None, DENSE), *sparse]


def _rows(command: BenchmarkCommand, ready: Ready, samples: list[Sample]) -> Iterator[Row]:
    """Yield one row for each task, cell and metric, with the harness's own value and standard error."""
    for sample in samples:
        row = rows_of(command, ready, PHASES[command.rows], sample["items"])
        for cell in sample["cells"]:
            for metric, (value, error) in cell["results"].items():
                values = cell["values"].get(metric, [])
                mean = bool(values) and math.isclose(value, sum(values) / len(values), abs_tol=1e-9)
                if mean:
                    (estimate,) = mean_estimates([[item] for item in values])
                else:
                    estimate = normal(value, error)
                at = {"budget": cell["budget"], "rule": cell["rule"], "density": cell["density"], "where": cell["task"]}
                count = {"n": len(values)} if values else {}  # RULER's metrics have an item for one length only
                yield row(cell["method"], metric, estimate, stderr=error, **count, **at)


def means_of_tasks(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield plain means over tasks, each in `where`, for methods, budgets and metrics that all tasks have."""
    tasks = len({row.where for row in rows})
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.method, row.budget, row.metric), []).append(row)
    for found in (group for group in groups.values() if 1 < len(group) == tasks):
        mean = sum(row.value for row in found) / len(found)
        errors = [row.stderr for row in found if row.stderr is not None]
        error = math.hypot(*errors) / len(found) if len(errors) == len(found) else None
        shown = normal(mean, error)
        at = {"where": f"mean of {len(found)} tasks", "n": sum(row.n for row in found)}
        at["density"] = sum(row.density or 0.0 for row in found) / len(found)
        yield replace(found[0], value=mean, low=shown.low, high=shown.high, stderr=error, **at)
