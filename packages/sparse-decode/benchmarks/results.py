"""Stores results of benchmarks, with the machine they were measured on."""

import json
import pathlib
from datetime import UTC, datetime
from typing import Any

import torch
from hashtrain.files.atomic import write_text


def machine() -> dict[str, Any]:
    """Return the CPU, the number of threads, torch's version and the date."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else "unknown",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def store(result: dict[str, Any], out: pathlib.Path | None) -> None:
    """Write a result to `out`, if given, and print it as one line of JSON."""
    if out is not None:
        write_text(out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
