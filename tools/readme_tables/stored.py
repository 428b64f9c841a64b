"""Stored results: trim a run into docs/results, and read it there for a table.

A stored result is a file, `serving`, or an entry of a file of several runs, `demo/decode`.
"""

import json
import pathlib
import re
from typing import Any

from evals.results import Result, read_json, read_result, rows_from_json, rows_to_text
from hashtrain.files.atomic import write_text

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results"
METRICS = {
    "ppl": ("perplexity", "perplexity_ratio", "kl", "nll"),
    "throughput": ("p50_ms", "p99_ms", "tokens_per_s", "kv_bytes", "code_bytes"),
}
"""By task, the metrics that are kept; of other tasks, all."""
DIGITS = 5


def stored(results: pathlib.Path, name: str) -> dict[str, Any]:
    """Read a stored result as JSON. Raises: ValueError if it is missing or damaged."""
    file, _, key = name.partition("/")
    path = results / f"{file}.json"
    if not path.is_file():
        raise ValueError(f"a README has a table of {name}, expected it in {path.name}; store a run with --from")
    found = read_json(path, "store the run again with --from")
    if key and key not in found:
        raise ValueError(f"a README has a table of {name}, {path.name} has no {key}; store a run with --from")
    return found[key] if key else found


def load(results: pathlib.Path, name: str) -> Result:
    """Read a stored run of evals."""
    data = stored(results, name)
    return Result(data["config"], data["environment"], rows_from_json(data))


def store(run: pathlib.Path, name: str, results: pathlib.Path = RESULTS) -> pathlib.Path:
    """Copy the parts of a run of evals or hashtrain that tables need, rounded, under a name.

    Returns: the file. Raises: ValueError if there is no finished run.
    """
    trained = run / "metrics.json"
    data = rounded(_trained(read_json(trained, "run again")) if trained.is_file() else _measured(read_result(run)))
    file, _, key = name.partition("/")
    path = results / f"{file}.json"
    if key:
        others = read_json(path, "restore it") if path.is_file() else {}
        data = {**others, key: data}
    write_text(path, compact(data) + "\n")
    return path


def _measured(result: Result) -> dict[str, Any]:
    """Return a run of evals without its rows of single heads."""
    kept = METRICS.get(result.config["task"])
    rows = [row for row in result.rows if row.head is None and (kept is None or row.metric in kept)]
    return {"config": result.config, "environment": result.environment, **json.loads(rows_to_text(rows))}


_BY_HEAD = {"iou_by_head", "mass_by_head", "failing"}


def _trained(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a training without lists by head, except those of the worst rows."""
    hashers = {}
    for name, found in metrics["hashers"].items():
        hashers[name] = {key: found[key] for key in ("dense_layers", "failing", "cost") if key in found}
        layers = [{k: v for k, v in at.items() if k not in _BY_HEAD} for at in found["kv_head"]["layers"]]
        hashers[name]["kv_head"] = {"layers": layers, "mean": found["kv_head"]["mean"]}
    return {**metrics, "hashers": hashers}


def rounded(data: Any) -> Any:
    """Round every float in data to DIGITS digits."""
    if isinstance(data, float):
        return float(f"{data:.{DIGITS}g}")
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    return [rounded(value) for value in data] if isinstance(data, list) else data


def compact(data: dict[str, Any]) -> str:
    """Format as JSON with one line for each innermost list or object."""
    inner = re.compile(r"([\[{])\n\s*([^\[\]{}]*?)\n\s*([\]}])")  # a line break is never inside a string of JSON
    return inner.sub(lambda m: m[1] + re.sub(r"\s*\n\s*", " ", m[2]) + m[3], json.dumps(data, indent=1))
