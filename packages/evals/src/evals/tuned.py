"""Rivals with other parameters than their papers': how they are made, and what `evals tune` found for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evals.methods import RIVAL_NAMES, TUNED, LoadedMethod
from evals.result import read_json
from evals.rivals import MagicPigSelector, QuestSelector

FILE = "tuned.json"
_ENDS = {"magicpig": (4, 64), "magicpig-bare": (0, 0), "magicpig-10x150": (4, 64)}
"""Sink and local tokens."""
_SPOTLIGHT, _AUTHORS = {"bits": 15, "tables": 100}, {"bits": 10, "tables": 150}
PUBLISHED: dict[str, tuple[dict[str, int], ...]] = {
    **{name: ({"page": 16},) for name in ("quest", "quest-heads")},
    **{name: (_SPOTLIGHT, _AUTHORS) for name in _ENDS},
    "magicpig-10x150": (_AUTHORS, _SPOTLIGHT),
}
"""Quest's as its paper runs it, MagicPIG's as the paper on Spotlight Attention does and by its authors' default; the
method of `evals list` with that name has the first."""


@dataclass(frozen=True)
class Tuned:
    """What `evals tune` chose."""

    parameters: Mapping[str, Mapping[str, int]]
    """By method."""
    documents: frozenset[str]
    """Digests of the contexts that they were chosen on."""


def rival(name: str, parameters: Mapping[str, int], label: str) -> LoadedMethod:
    """Make a rival with these parameters, under a label. Raises: ValueError if they cannot be used."""
    identity = f"{name}-" + "-".join(f"{k}{v}" for k, v in sorted(parameters.items()))
    if name in _ENDS:
        sink, local = _ENDS[name]
        selector = MagicPigSelector(**parameters, sink=sink, local=local)
        facts = f"{identity}-{sink}-{local}-{selector.prefill}-{selector.seed}", selector, None
        return LoadedMethod(label, "magicpig", selector.bits * selector.tables, *facts)
    heads = QuestSelector(per_query_head=True, **parameters)
    own = heads if name == "quest-heads" else QuestSelector(per_query_head=False, **parameters)
    return LoadedMethod(label, name, None, identity, own, heads)


def read_tuned(folder: Path, model_identity: str, phase: str) -> Tuned:
    """Read what `evals tune` chose.

    Raises: ValueError in one sentence if it is missing, damaged, of another model or phase.
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
            raise ValueError(f"{path} was tuned for --phase {data['phase']}, this is {phase}; {remedy} --phase {phase}")
        parameters, documents = data["parameters"], frozenset(data["documents"])
        for name, found in parameters.items():
            if name not in RIVAL_NAMES:
                raise ValueError(
                    f"{path} has parameters of {name}, expected some of {', '.join(RIVAL_NAMES)}; {remedy}"
                )
            rival(name, found, name)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {remedy}") from error
    return Tuned(parameters, documents)


def with_tuned(methods: Sequence[LoadedMethod], tuned: Tuned) -> list[LoadedMethod]:
    """Put each rival's tuned form behind it. Raises: ValueError if no rival among the methods was tuned."""
    found: list[LoadedMethod] = []
    for method in methods:
        found.append(method)
        if method.name in tuned.parameters:
            found.append(rival(method.name, tuned.parameters[method.name], method.name + TUNED))
    if len(found) == len(methods):
        raise ValueError(
            f"--tuned needs one of {', '.join(tuned.parameters)} in --methods, got {', '.join(m.name for m in methods)}"
        )
    return found
