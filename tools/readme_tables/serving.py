"""The tables of sparse-serve: decode steps of a serving engine, and what its checks found."""

import pathlib
from typing import Any

from evals.grid import Grid, to_markdown

from readme_tables.stored import stored


def serving(results: pathlib.Path) -> str:
    """Return the table of decode step times by processor and context, from benchmarks/throughput.py."""
    runs = [stored(results / f"{name}.json") for name in ("serving_without_amx", "serving")]
    first = runs[0]
    shape, what = first["shape"], "Processor milliseconds" if first["processor_time"] else "Milliseconds"
    title = (
        f"{what} of a decode step of {first['requests']} requests: {shape['num_hidden_layers']} layers of "
        f"{shape['num_attention_heads']} query and {shape['num_key_value_heads']} KV heads of {shape['head_dim']} in "
        f"bfloat16, random weights, {first['bits']}-bit codes of an untrained `{first['hasher']}`, "
        f"{first['fraction']:.0%} selected from {first['dense_below']:,} tokens on"
    )
    header = ["processor", "tokens each", "vLLM", "sparse", "vLLM / sparse"]
    return to_markdown(Grid(title, header, [_steps(found) for found in runs]))


def _steps(found: dict[str, Any]) -> list[list[str]]:
    threads = found["threads"]
    where = f"{found['processor']}, {threads} thread{'s' * (threads != 1)}, {found['engine']}, {found['date']}"
    where += ", taken beside other work" * found["busy"]
    return [
        [where, f"{row['context']:,}", f"{row['stock']:.1f}", f"{row['ours']:.1f}", f"{row['ratio']:.2f} x"]
        for row in sorted(found["rows"], key=lambda row: row["context"])
    ]


_PARTS = ("exact", "budgets", "crossing", "arrivals", "ranks", "preemption", "poison", "others", "clients", "start")
_SEEN = {
    "preemptions": "{:,} preemptions",
    "poisoned": "{:,} pages poisoned",
    "abandoned": "{:,} abandoned",
    "lasted": "{:,.0f} s of requests",
}


def checks(results: pathlib.Path) -> str:
    """Return the table of what the serving checks found, by part, from tools/check_serving.py and check_server.py."""
    found = stored(results / "serving_checks.json")["parts"]
    lines = [_part(name, found[name]) for name in _PARTS if name in found]
    machines = sorted({(part["engine"], part["processor"], part["hash"]) for part in found.values()})
    dates = sorted({part["date"] for part in found.values()})
    title = (
        f"What the checks found, {'; '.join(f'{a}, {b}, {c} hash' for a, b, c in machines)}, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}"
    )
    header = ["part", "answers", "equal", "at near-ties", "wrong", "seen", "seconds"]
    return to_markdown(Grid(title, header, [lines]))


def _part(name: str, part: dict[str, Any]) -> list[str]:
    total = {key: sum(row[key] for row in part["rows"] if key in row) for key in ("answers", "equal", "ties", *_SEEN)}
    # Rows whose answers have nothing to be equal to: preempted ones below 100 %, and the README's.
    alone = sum(row["answers"] for row in part["rows"] if "equal" not in row)
    equal = f"{total['equal']:,}" + f" of {total['answers'] - alone:,}" * bool(alone)
    seen = ", ".join(text.format(total[key]) for key, text in _SEEN.items() if total[key])
    wrong = str(len(part["wrong"]))
    return [name, f"{total['answers']:,}", equal, f"{total['ties']:,}", wrong, seen, f"{part['seconds']:,.0f}"]
