"""The command line: `evals list`, and one command per task."""

import json
import sys
import time
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from hashtrain import command_line
from hashtrain.usage import guarded, require_folder
from rich.console import Console
from rich.table import Table

from evals.methods import METHODS
from evals.tasks.benchmark_settings import FewshotCommand, LongbenchCommand, RulerBenchmarkCommand
from evals.tasks.settings import FidelityCommand, IouCommand, NeedleCommand, PplCommand, ThroughputCommand

# Other imports are made where they are used, so that `--help` does not wait for torch and transformers.
if TYPE_CHECKING:
    from evals.results import Result

TASKS = {  # name: settings, and module of evals.tasks whose `run` it is
    "ppl": (PplCommand, "ppl"),
    "iou": (IouCommand, "iou"),
    "fidelity": (FidelityCommand, "fidelity"),
    "needle": (NeedleCommand, "needle"),
    "longbench": (LongbenchCommand, "benchmark"),
    "ruler": (RulerBenchmarkCommand, "benchmark"),
    "fewshot": (FewshotCommand, "benchmark"),
    "throughput": (ThroughputCommand, "throughput"),
}


@dataclass(frozen=True)
class ListCommand:
    """List the tasks and the methods. Example: `evals list`."""


COMMANDS: dict[str, Any] = {"list": ListCommand, **{name: kind for name, (kind, _) in TASKS.items()}}


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Returns: 0; 2 with one sentence on stderr if the input cannot be used; 130 if interrupted from the keyboard.
    """
    stopped = "stopped; rerun the command to continue with the remaining documents"
    return guarded("evals", lambda: _main(arguments), stopped)


def _main(arguments: list[str] | None) -> int:
    # On a terminal, tables share stdout with the JSON line; otherwise they go to stderr.
    console = Console(stderr=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 160)
    command = _parse(arguments)
    last = _list(console) if isinstance(command, ListCommand) else _run(command, console)
    print(json.dumps(last), flush=True)
    return 0


def _parse(arguments: list[str] | None) -> Any:
    words = sys.argv[1:] if arguments is None else arguments
    what = "Measure the quality and speed of sparse attention, ours and others'. Example: `evals ppl --documents 4`."
    command = command_line.parse("evals", list(words), COMMANDS, what)
    if hasattr(command, "out"):
        require_folder(command.out)
    return command


def _run(command: Any, console: Console) -> dict[str, Any]:
    began = time.monotonic()
    run = next(run for kind, run in TASKS.values() if type(command) is kind)
    result: Result = resolve_name(f"evals.tasks.{run}:run")(command, console)
    files = "report.md, rows.json, figure.png and samples"
    console.print(f"stored in {command.out}: {files}", highlight=False)
    seconds = round(time.monotonic() - began, 1)
    return {"task": result.config["task"], "out": str(command.out), "seconds": seconds, "results": headline(result)}


def headline(result: "Result") -> list[dict[str, Any]]:
    """Return the results for the last line on stdout: one object per case, method, budget and rule."""
    from evals.tables import SHOWN

    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    chosen = SHOWN.get(result.config["task"])
    for row in result.select(against=None, layer=None, head=None):
        if chosen is None or row.metric in chosen:
            at = {"method": row.method, "budget": row.budget, "rule": row.rule, "heads": row.heads, "where": row.where}
            at = {name: value for name, value in at.items() if value is not None}
            found.setdefault(tuple(at.values()), at)[row.metric] = float(f"{row.value:.5g}")
    return list(found.values())


def _list(console: Console) -> dict[str, Any]:
    tasks = {name: " ".join((kind.__doc__ or "").split()) for name, kind in COMMANDS.items() if name != "list"}
    for title, entries in (("tasks", tasks), ("methods", METHODS)):
        console.print(f"{title}:")
        table = Table.grid(padding=(0, 1, 0, 2))
        for name, summary in entries.items():
            table.add_row(name, summary)
        console.print(table, highlight=False)
    return {"tasks": list(tasks), "methods": list(METHODS)}
