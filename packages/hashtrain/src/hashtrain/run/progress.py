"""Progress: a bar on a terminal, periodic lines elsewhere."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[str, int], None]
_INTERVAL = 30.0  # seconds between lines


@contextlib.contextmanager
def tracking(console: Console, total: int) -> Iterator[Advance]:
    """Yield `advance(description, steps)`, to be called as the `total` steps are done."""
    if console.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
            task = progress.add_task("", total=total)
            yield lambda description, steps: progress.update(task, description=description, advance=steps)
        return
    done, began, shown = 0, time.monotonic(), time.monotonic()

    def advance(description: str, steps: int) -> None:
        nonlocal done, shown
        done += steps
        now = time.monotonic()
        if now - shown >= _INTERVAL or done == total:
            shown = now
            console.print(f"{done}/{total} {description}, {now - began:.0f} s", highlight=False)

    yield advance


def live(path: Path, advance: Advance) -> Callable[..., None]:
    """Return a report function for `hashtrain.run.job.make`: progress goes to `advance`, JSON lines to `path`."""

    def report(description: str, steps: int, line: dict[str, Any] | None = None) -> None:
        advance(description, steps)
        if line is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    return report
