"""Rivals with the parameters that `evals tune` found for a model, instead of their papers'."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.methods import TUNED, LoadedMethod, load_rival
from evals.results import read_json

FILE = "tuned.json"


def read_tuned(folder: Path, model_identity: str, phase: str) -> dict[str, Any]:
    """Read the choice of `evals tune`.

    Returns: `parameters` by method, `documents`, the digests of the contexts that they were tuned on, and more.
    Raises: ValueError with one sentence if it is missing, no JSON, or of another model or phase.
    """
    remedy = f"make it with `uv run evals tune --out {folder}`"
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"no {FILE} in {folder}: {remedy}")
    data = read_json(path, f"delete that folder and {remedy}")
    if data["model_identity"] != model_identity:
        raise ValueError(f"{path} was tuned on another model or --dtype; {remedy} and the same --model and --dtype")
    if data["phase"] != phase:
        raise ValueError(f"{path} was tuned for --phase {data['phase']!r}, this is {phase}; {remedy} --phase {phase}")
    return data


def with_tuned(methods: Sequence[LoadedMethod], parameters: Mapping[str, Mapping[str, int]]) -> list[LoadedMethod]:
    """Insert each rival's tuned form after it. Raises: ValueError if no rival among the methods was tuned."""
    found: list[LoadedMethod] = []
    for method in methods:
        found.append(method)
        if method.name in parameters:
            found.append(load_rival(method.name, parameters[method.name], method.name + TUNED))
    if len(found) == len(methods):
        raise ValueError(
            f"--tuned needs one of {', '.join(parameters)} in --methods, got {', '.join(m.name for m in methods)}"
        )
    return found
