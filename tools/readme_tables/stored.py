"""Stored results: trim a run into docs/results, and read it there for a table."""

import json
import pathlib
import re
from dataclasses import replace
from typing import Any

from evals.metrics import Estimate
from evals.result import Result, Row, read_json, read_result, rows_from_json, rows_to_text
from hashtrain.files.atomic import write_text

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results"
_KEPT: dict[str, tuple[str, ...]] = {
    "ppl": ("perplexity", "perplexity_per_document", "perplexity_ratio", "kl", "nll", "nll_most"),
    "iou": ("iou", "recall", "mass", "low", "lost"),
    "codelength": ("iou", "equal_lsh_bits", "times_shorter"),
    "codes": ("iou", "mass", "worst"),
    **dict.fromkeys(("cones", "codesize", "complexity", "fidelity", "needle", "output-error", "ruler-synthetic"), ()),
    "kernels": ("p50_ms", "p99_ms", "share_of_roofline"),
    "throughput": ("p50_ms", "p99_ms", "tokens_per_s", "share_of_bandwidth", "kv_bytes", "code_bytes"),
}
"""By task, the metrics shown in tables; empty: all."""
_BY_HEAD = ("low", "lost")
"""Metrics of the worst rows, which are kept for every head; of others, the means."""
DIFFERENCES = "differences.json"
"""File that `evals paper` writes with its report: the paired differences of its items."""
_DIGITS = 5
_CURVE_POINTS = 60


def store(run: pathlib.Path, results: pathlib.Path = RESULTS, name: str = "") -> pathlib.Path:
    """Copy the parts of a run that tables need, rounded, under `name` or the run's task.

    Returns: the file. Raises: ValueError if there is no finished run, or no table for such runs.
    """
    if (run / "metrics.json").is_file():
        target = results / f"{name or 'training'}.json"
        text = _compact(_trim_metrics(read_json(run / "metrics.json", "run again")))
    elif (run / DIFFERENCES).is_file():
        target = results / f"{name or 'differences'}.json"
        text = json.dumps(rounded(read_json(run / DIFFERENCES, "run `evals paper --all` again")), indent=1)
    else:
        result = read_result(run)
        task = result.config["task"]
        if task not in _KEPT:
            raise ValueError(f"runs of {', '.join(_KEPT)} have a table, got {run}, one of {task}")
        # A separate name, so that one phase never overwrites the other by accident.
        own = "ppl_decode" if result.config.get("phase") == "decode" else task
        kept = [row for row in result.rows if not _KEPT[task] or row.metric in _KEPT[task]]
        dense = result.config.get("dense_at", [])  # layers that stay dense by index have no selection
        rows = [row for row in kept if (row.head is None or row.metric in _BY_HEAD) and row.layer not in dense]
        table = json.loads(rows_to_text(rows))
        lines = ",\n".join(json.dumps(rounded(line)) for line in table["rows"])
        head = {"config": result.config, "environment": result.environment, "columns": table["columns"]}
        target, text = results / f"{name or own}.json", f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n]}}'
    write_text(target, text + "\n")
    return target


def load(path: pathlib.Path) -> Result:
    """Read a stored result."""
    data = stored(path)
    return Result(data["config"], data["environment"], rows_from_json(data))


def named(result: Result, model: str) -> Result:
    """Replace the model name in a result, which was a folder, by the name that readers know."""
    return replace(result, config={**result.config, "model": model})


def spread(found: Row | Estimate, how: str) -> str:
    """Format a value and its 95 % interval, if it has one, with a format such as `.3f`."""
    value = found.value if isinstance(found, Row) else found.mean
    interval = "" if found.low is None or found.high is None else f" [{found.low:{how}}, {found.high:{how}}]"
    return f"{value:{how}}{interval}"


def stored(path: pathlib.Path) -> dict[str, Any]:
    """Read the JSON of a stored result. Raises: ValueError if it is missing or damaged."""
    if not path.is_file():
        raise ValueError(
            f"a README has a table of {path.name}, expected it in {path.parent.name}; store a run with --from"
        )
    return read_json(path, "store the run again with --from")


def _trim_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Drop lists by head except those of the worst rows per KV head; reduce the mean loss curve to _CURVE_POINTS."""
    hashers = {}
    worst = {f"{metric}_by_head" for metric in _BY_HEAD}
    for name, found in metrics["hashers"].items():
        hashers[name] = {key: found[key] for key in ("dense_layers", "failing", "repaired", "cost") if key in found}
        for heads in ("kv_head", "query_head", "remainder"):
            names = {key for layer in found[heads]["layers"] for key in layer if not key.endswith("_by_head")}
            names |= worst if heads == "kv_head" else set()
            layers = [{k: v for k, v in layer.items() if k in names} for layer in found[heads]["layers"]]
            hashers[name][heads] = {"layers": layers, "mean": found[heads]["mean"]}
        hashers[name]["curve"] = _curve(found["losses"])
    return rounded({**metrics, "hashers": hashers})


def _compact(data: dict[str, Any]) -> str:
    """Format as JSON with one line for each innermost list or object."""
    inner = re.compile(r"([\[{])\n\s*([^\[\]{}]*?)\n\s*([\]}])")  # a line break is never inside a string of JSON
    return inner.sub(lambda m: m[1] + re.sub(r"\s*\n\s*", " ", m[2]) + m[3], json.dumps(data, indent=1))


def _curve(losses: list[list[float]]) -> list[float]:
    """Average the layers' losses, then over groups of steps; empty for an untrained hasher."""
    steps = [sum(column) / len(column) for column in zip(*losses, strict=True)]
    size = max(1, len(steps) // _CURVE_POINTS)
    return [sum(part) / len(part) for i in range(0, len(steps), size) if (part := steps[i : i + size])]


def rounded(data: Any) -> Any:
    """Round every float in data to _DIGITS digits."""
    if isinstance(data, float):
        return float(f"{data:.{_DIGITS}g}")
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    return [rounded(value) for value in data] if isinstance(data, list) else data
