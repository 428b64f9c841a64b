"""The command line: `evals list`, and one command per task."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from hashtrain import command_line
from hashtrain.usage import guarded, require_folder
from rich.console import Console
from rich.table import Table

from evals.base_commands import IouCommand, ListCommand, PplCommand
from evals.benchmarks import FewshotCommand, LongbenchCommand, RulerBenchmarkCommand
from evals.commands import (
    CodelengthCommand,
    CodesCommand,
    CodesizeCommand,
    ComplexityCommand,
    ConesCommand,
    FidelityCommand,
    NeedleCommand,
    OutputErrorCommand,
    RulerCommand,
)
from evals.methods import METHODS
from evals.speed import KernelsCommand, ThroughputCommand
from evals.study import CompareCommand, FrontierCommand, PaperCommand, ReportCommand, SuggestCommand, TuneCommand

# Other imports are made where they are used, so that `--help` does not wait for torch and transformers.
if TYPE_CHECKING:
    from evals.result import Result

TASKS = {  # name: command, and module:function of evals.tasks
    "ppl": (PplCommand, "ppl:run"),
    "iou": (IouCommand, "iou:run"),
    "output-error": (OutputErrorCommand, "output_error:run"),
    "fidelity": (FidelityCommand, "fidelity:run"),
    "needle": (NeedleCommand, "needle:run"),
    "ruler-synthetic": (RulerCommand, "ruler:run"),
    "longbench": (LongbenchCommand, "benchmark:run"),
    "ruler": (RulerBenchmarkCommand, "benchmark:run"),
    "fewshot": (FewshotCommand, "benchmark:run"),
    "cones": (ConesCommand, "cones:run"),
    "codelength": (CodelengthCommand, "codelength:run"),
    "codes": (CodesCommand, "codes:run"),
    "codesize": (CodesizeCommand, "formula:codesize"),
    "complexity": (ComplexityCommand, "formula:complexity"),
    "suggest": (SuggestCommand, "suggest:run"),
    "tune": (TuneCommand, "tune:run"),
    "throughput": (ThroughputCommand, "throughput:run"),
    "kernels": (KernelsCommand, "kernels:run"),
}
_HEADLINE = {"ppl": ("perplexity", "perplexity_ratio", "kl"), "iou": ("iou", "mass")}


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
    last = _SPECIAL.get(type(command), _run)(command, console)
    print(json.dumps(last), flush=True)
    return 0


def _parse(arguments: list[str] | None) -> Any:
    words = sys.argv[1:] if arguments is None else arguments
    command = command_line.parse("evals", list(words), COMMANDS)
    if hasattr(command, "out"):
        require_folder(command.out)
    return command


def _run(command: Any, console: Console) -> dict[str, Any]:
    began = time.monotonic()
    run = next(run for kind, run in TASKS.values() if type(command) is kind)
    result: Result = resolve_name(f"evals.tasks.{run}")(command, console)
    files = "report.md, figure.png, rows.json, rows.parquet and samples"
    console.print(f"stored in {command.out}: {files}", highlight=False)
    seconds = round(time.monotonic() - began, 1)
    return {"task": result.config["task"], "out": str(command.out), "seconds": seconds, "results": headline(result)}


def headline(result: "Result") -> list[dict[str, Any]]:
    """Return the results for the last line on stdout: one object per case, method, budget and rule."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    chosen = _HEADLINE.get(result.config["task"])
    for row in result.select(against=None, layer=None, head=None):
        if chosen is None or row.metric in chosen:
            at = {"method": row.method, "budget": row.budget, "rule": row.rule, "heads": row.heads, "where": row.where}
            at = {name: value for name, value in at.items() if value is not None}
            found.setdefault(tuple(at.values()), at)[row.metric] = float(f"{row.value:.5g}")
    return list(found.values())


def _list(command: ListCommand, console: Console) -> dict[str, Any]:
    tasks = {name: " ".join((kind.__doc__ or "").split()) for name, kind in COMMANDS.items() if name != "list"}
    methods = {method.name: method.summary for method in METHODS}
    for title, entries in (("tasks", tasks), ("methods", methods)):
        console.print(f"{title}:")
        table = Table.grid(padding=(0, 1, 0, 2))
        for name, summary in entries.items():
            table.add_row(name, summary)
        console.print(table, highlight=False)
    return {"tasks": list(tasks), "methods": list(methods)}


def _report(command: ReportCommand, console: Console) -> dict[str, Any]:
    from evals.page import section_of, write_page

    sections = [section_of(folder) for folder in command.runs]
    write_page(command.out, command.title, sections)
    console.print(f"written: {command.out / 'report.html'} and report.md", highlight=False)
    return {"out": str(command.out), "sections": [section.title for section in sections]}


def _compare(command: CompareCommand, console: Console) -> dict[str, Any]:
    from evals.compare import compare
    from evals.grid import to_rich

    methods, budgets = (command.method_a, command.method_b), (command.budget_a, command.budget_b)
    entries, grid = compare(command.first, command.second, methods, budgets)
    console.print(to_rich(grid))
    return {"differences": entries}


def _frontier(command: FrontierCommand, console: Console) -> dict[str, Any]:
    from hashtrain.files.atomic import write_text

    from evals.frontier import draw, grid, points, require_comparable
    from evals.frontier_times import clocked, described, read, taken
    from evals.grid import to_markdown, to_rich
    from evals.result import as_written, read_result
    from evals.shapes import load_config, shape_of

    head_dim = shape_of(load_config(command.model)).head_dim
    results = [read_result(folder) for folder in command.runs]
    require_comparable(results)
    with as_written(" or ".join(map(str, command.runs))):
        found = points(results, head_dim)
    times = clocked(command, results[0].config, found) if command.clock else command.times and read(command.times)
    steps, where = (taken(times, found), described(times)) if times else (None, "")
    command.out.mkdir(parents=True, exist_ok=True)
    write_text(command.out / "frontier.md", to_markdown(grid(found, steps, where)) + "\n")
    draw(found, command.out / "frontier.png", steps, where)
    console.print(to_rich(grid(found, steps, where)))
    console.print(f"written: {command.out / 'frontier.png'} and frontier.md", highlight=False)
    best = [{"method": point.line, "budget": point.budget, "bytes": point.share} for point in found if point.best]
    return {"out": str(command.out), "frontier": best}


def _paper(command: PaperCommand, console: Console) -> dict[str, Any]:
    from evals.page import section_of, write_page
    from evals.paper import ITEMS, chosen, why_not
    from evals.result import write_json

    items = chosen(command)
    if not items:
        return _paper_list(command, console)
    names, numbers = {item.name for item in items}, {item.number for item in items}
    for item in ITEMS:
        named = item.task and (command.all or item.number in numbers) and item.name not in names
        if named and (reason := why_not(item, command)):
            console.print(f"{item.name} is skipped: {reason}", highlight=False)
    commands = [item.commands(command) for item in items]
    sections, differences = [], {}
    for item, runs in zip(items, commands, strict=True):
        console.rule(f"{item.name}: {item.title}")
        for words in runs:
            console.print("evals " + " ".join(words), highlight=False)
            _run(_parse(words), console)
        first, *others = (section_of(folder, f"{item.name}: {item.title}") for folder in item.folders(command))
        differences[item.name], shown = item.differences(command)
        tables = [*first.tables, *(grid for other in others for grid in other.tables), *shown]
        own = [item.paper] if item.paper else []
        sections.append(replace(first, notes=item.differs, tables=(*tables, *own)))
    write_page(command.out, "The paper's tables and figures, measured here", sections)
    write_json(command.out / "differences.json", {name: found for name, found in differences.items() if found})
    console.print(f"written: {command.out / 'report.html'}, report.md and differences.json", highlight=False)
    return {"out": str(command.out), "items": [item.name for item in items]}


def _paper_list(command: PaperCommand, console: Console) -> dict[str, Any]:
    """Print every item with its commands and stored results, and count them by part and by number."""
    from evals.paper import ITEMS, shares

    kept = {item.name: [file.name for file in item.kept(command)] for item in ITEMS}
    for item in ITEMS:
        none = "nothing to store" if item.nothing_to_store else "nothing stored"
        stored = f"stored in {command.results}: {', '.join(kept[item.name])}" if kept[item.name] else none
        words = "\n  ".join((*item.lines(command), stored))
        console.print(f"{item.name}: {item.title}\n  {words}", highlight=False, soft_wrap=True)
    found = shares(ITEMS, {name for name, files in kept.items() if files})
    parts, numbers = found.stored_parts / max(1, found.parts), found.stored_numbers / max(1, found.numbers)
    console.print(
        f"{found.stored_parts} of {found.parts} parts have a stored result ({100 * parts:.0f} %)\n"
        f"{found.stored_numbers} of {found.numbers} tables and figures have one ({100 * numbers:.0f} %), "
        f"{found.whole_numbers} of them for every part\n"
        f"{found.nothing_to_store} more are drawings, listings or quotations: nothing to store",
        highlight=False,
    )
    return {"items": list(kept), "stored": kept, "shares": found._asdict()}


STUDIES: dict[str, tuple[type, Callable[[Any, Console], dict[str, Any]]]] = {
    "report": (ReportCommand, _report),
    "compare": (CompareCommand, _compare),
    "frontier": (FrontierCommand, _frontier),
    "paper": (PaperCommand, _paper),
}
COMMANDS: dict[str, Any] = {"list": ListCommand, **{name: kind for name, (kind, _) in (TASKS | STUDIES).items()}}
_SPECIAL = {ListCommand: _list, **dict(STUDIES.values())}

if __name__ == "__main__":
    raise SystemExit(main())
