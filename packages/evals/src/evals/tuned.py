"""Rivals with the parameters that `evals tune` found for a model, instead of their papers'."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evals.methods import TUNED, LoadedMethod, load_rival
from evals.results import read_json
from evals.rivals.table import RIVALS

FILE = "tuned.json"


@dataclass(frozen=True)
class Tuned:
    """The choice of `evals tune`."""

    parameters: Mapping[str, Mapping[str, int]]
    """Parameters by method."""
    documents: frozenset[str]
    """Digests of the contexts that they were tuned on."""


def read_tuned(folder: Path, model_identity: str, phase: str) -> Tuned:
    """Read the choice of `evals tune`.

    Raises: ValueError with one sentence if it is missing, damaged, or of another model or phase.
    """
    remedy = f"make it with `uv run evals tune --out {folder}`"
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"no {FILE} in {folder}: {remedy}")
    data = read_json(path, f"delete that folder and {remedy}")
    try:
        if data["model_identity"] != model_identity:
            raise ValueError(f"{path} was tuned on another model or --dtype; {remedy} and the same --model and --dtype")
        if data["phase"] != phase:
            raise ValueError(
                f"{path} was tuned for --phase {data['phase']!r}, this is {phase}; {remedy} --phase {phase}"
            )
        parameters, documents = data["parameters"], frozenset(data["documents"])
        for name, found in parameters.items():
            if name not in RIVALS:
                raise ValueError(f"{path} has parameters of {name}, expected some of {', '.join(RIVALS)}; {remedy}")
            try:
                load_rival(name, found, name)
            except ValueError as error:
                raise ValueError(f"{path}: {error}, or {remedy}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {remedy}") from error
    return Tuned(parameters, documents)


def with_tuned(methods: Sequence[LoadedMethod], tuned: Tuned) -> list[LoadedMethod]:
    """Insert each rival's tuned form after it. Raises: ValueError if no rival among the methods was tuned."""
    found: list[LoadedMethod] = []
    for method in methods:
        found.append(method)
        if method.name in tuned.parameters:
            found.append(load_rival(method.name, tuned.parameters[method.name], method.name + TUNED))
    if len(found) == len(methods):
        raise ValueError(
            f"--tuned needs one of {', '.join(tuned.parameters)} in --methods, got {', '.join(m.name for m in methods)}"
        )
    return found
