"""What the benchmarks share: the processor's name, and numbers as they are stored."""

import pathlib
import platform
from typing import Any


def processor() -> str:
    """Return the name of the CPU; its architecture if unknown."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def rounded(data: Any) -> Any:
    """Return data with all floats rounded to 4 significant digits."""
    if isinstance(data, float):
        return float(f"{data:.4g}")
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    return [rounded(value) for value in data] if isinstance(data, list) else data
