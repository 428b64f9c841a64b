"""Tables of codes of 16 bytes a key, from stored runs of `evals codes`."""

import pathlib

from evals.codes import CODES
from evals.grid import Grid, percent, to_markdown
from evals.report import protocol
from evals.result import Result, Row
from evals.tasks.codes import ADDED, BY_HEAD, OURS, WORST

from readme_tables.headline import SECOND_MODEL
from readme_tables.stored import load, spread

RUNS = {"demo model": "codes_demo", SECOND_MODEL: "codes_smol"}
"""Stored runs by model."""
METRICS = ("iou", "mass", WORST)
_HASHED = {
    "lsh": "128 signs of a random rotation",
    "transform-start": "128 digits, untrained",
    "transform": "128 digits",
    "exact keys": "the key itself, for comparison",
}


def codes(names: dict[str, str], results: pathlib.Path) -> str:
    """Return the table of all codes, the best first, from stored runs by model."""
    found = {subject: load(results / f"{name}.json") for subject, name in names.items()}
    sections = [[[subject, *line] for line in _lines(result)] for subject, result in found.items()]
    first = next(iter(found.values())).config
    title = (
        f"IoU [95 % interval], attention mass, and its 5th percentile in the worst head of any layer, top "
        f"{percent(first['budgets'][0])} of visible tokens, {protocol(first)}; {_contexts(found)}, "
        f"{first['rows']} rows each. Added: one ranking by the sum of a group's "
        "scores, as deployed. By head: the softmax of each query head's scores, added"
    )
    header = ["model", "code", "16 bytes", *(f"{m}, {way}" for way in (ADDED, BY_HEAD) for m in _SHORT)]
    return to_markdown(Grid(title, header, sections))


def differences(names: dict[str, str], results: pathlib.Path) -> str:
    """Return the table of paired differences between ours and each other code, and of layers won."""
    sections = []
    for subject, name in names.items():
        result = load(results / f"{name}.json")
        others = dict.fromkeys(row.against for row in result.rows if row.against in CODES)
        sections.append([[subject, o, *_pair(result, o, ADDED), *_pair(result, o, BY_HEAD)] for o in map(str, others)])
    title = (
        f"`{OURS}` less each other code, paired over contexts [95 % interval], and in how many layers it finds "
        "more mass; below zero the other is better"
    )
    header = ["model", "code", *(f"{m}, {way}" for way in (ADDED, BY_HEAD) for m in ("IoU", "mass", "layers"))]
    return to_markdown(Grid(title, header, sections))


def layers(name: str, way: str, results: pathlib.Path) -> str:
    """Return the table of all layers of a stored run, one column per code."""
    result = load(results / f"{name}.json")
    methods = _methods(result)
    numbers = sorted({row.layer for row in result.rows if row.layer is not None})
    body = [[str(n), *(_shown(result, method, way, n) for method in methods)] for n in numbers]
    title = f"IoU / attention mass / its 5th percentile in the worst head, by layer, scores {way}"
    return to_markdown(Grid(title, ["layer", *methods], [body]))


_SHORT = ("IoU", "mass", "worst")


def _methods(result: Result) -> list[str]:
    """Return the codes, the best mass by added scores first."""
    own = {row.method: row.value for row in result.select(metric="mass", layer=None, where=ADDED, against=None)}
    return sorted(own, key=lambda name: -own[name])


def _lines(result: Result) -> list[list[str]]:
    lines = []
    for name in _methods(result):
        line = [name, _HASHED[name] if name in _HASHED else CODES[name].stored]
        for way in (ADDED, BY_HEAD):
            iou, mass, worst = (_one(result, name, way, metric, None) for metric in METRICS)
            line += [spread(iou, ".3f"), f"{mass.value:.4f}", f"{worst.value:.2f}"]
        lines.append(line)
    return lines


def _one(result: Result, method: str, way: str, metric: str, layer: int | None) -> Row:
    budget = result.config["budgets"][0]
    return result.one(method=method, where=way, metric=metric, layer=layer, budget=budget, against=None)


def _shown(result: Result, method: str, way: str, layer: int) -> str:
    iou, mass, worst = (_one(result, method, way, metric, layer).value for metric in METRICS)
    return f"{iou:.3f} / {mass:.3f} / {worst:.2f}"


def _pair(result: Result, other: str, way: str) -> list[str]:
    at = {"method": OURS, "where": way, "against": other, "budget": result.config["budgets"][0]}
    found = [result.one(metric=metric, **at) for metric in ("iou", "mass")]
    numbers = sorted({row.layer for row in result.rows if row.layer is not None})
    mass = {name: [_one(result, name, way, "mass", n).value for n in numbers] for name in (OURS, other)}
    won = sum(mine > theirs for mine, theirs in zip(mass[OURS], mass[other], strict=True))
    return [*(spread(row, "+.3f") for row in found), f"{won} of {len(numbers)}"]


def _contexts(found: dict[str, Result]) -> str:
    runs = ((subject, result.config) for subject, result in found.items())
    return " and ".join(f"{run['documents']} held-out contexts of {run['context']:,} tokens ({x})" for x, run in runs)
