"""Tables of times that belong to no single package: decode steps, a training step, the commands of README.md."""

import pathlib
from typing import Any

from evals.grid import Grid, cell_of, percent, to_markdown
from evals.result import Result

from readme_tables.stored import load, stored

_AS_FAST = 1.005  # the benchmark's resolution


def needs(results: pathlib.Path) -> str:
    """Return a sentence on the time and disk that the first two commands of README.md take."""
    found = stored(results / "readme.json")
    first, second = (f"{block['seconds'] / 60:.0f}" for block in found["blocks"][:2])
    return (
        f"These took {first} and {second} minutes on {found['cores']} cores ({found['processor']}), and "
        f"{found['disk'] / 1e9:.1f} GB of disk."
    )


def speed(results: pathlib.Path) -> str:
    """Return the table of speed-ups by context: attention of one layer, and a whole model."""
    names = ("sparse_attention", "sparse_model_decode", "never_slower")
    attention, model, short = (stored(results / f"{name}.json") for name in names)
    whole = {row["n"]: row for row in model["rows"] if row["batch"] == 1}
    even = min(row["n"] for row in short["rows"] if row["sparse"]["ratio"] <= _AS_FAST)
    by_length: dict[int, dict[str, float]] = {}
    for row in attention["rows"]:
        by_length.setdefault(row["n"], {})[row["dtype"]] = row["ratio"]
    lines = []
    for n, ratios in sorted(by_length.items()):
        layer = [f"{ratios[kind]:.1f} x" for kind in ("bfloat16", "float32")]
        step = whole.get(n)
        own = f"{step['shipped_ms'] / step['sparse_ms']:.0f} x" if step else ""
        lines.append([f"{n:,}", *layer, f"{step['ratio']:.1f} x" if step else "", own])
    title = (
        f"Time of a dense over that of a sparse decode step on a CPU, {100 * attention['fraction']:g} % selected, "
        "random weights. Dense is the fastest dense code we could write; in the last column, it is the model as "
        f"Hugging Face ships it, the fastest of its {model['rows'][0]['shipped_steps']} steps. "
        f"Attention: a layer of {attention['query_heads']} query and {attention['kv_heads']} KV heads of "
        f"{attention['head_dim']} ({_machine(attention)}). Model: "
        f"Qwen2.5-0.5B's shape, {model['layers']} of 24 layers, bfloat16 ({_machine(model)}). A sparse step of "
        f"{short['model']} is no slower than Hugging Face's dense one from {even:,} tokens on ({_machine(short)}). "
        f"Hashers: `transform`, {attention['planes']} query planes"
    )
    header = ["context", "attention, bfloat16", "attention, float32", "model", "model, against Hugging Face's step"]
    return to_markdown(Grid(title, header, [lines]))


def _machine(found: dict[str, Any]) -> str:
    """Return the processor and threads of a stored benchmark: columns of one table may be from different machines."""
    return f"{found['processor']}, {found['threads']} thread{'s' * (found['threads'] != 1)}"


def training_step(results: pathlib.Path) -> str:
    found = stored(results / "training_step.json")
    title = (
        f"Milliseconds of processor time of a step of `{found['hasher']}`, one layer of the demo model, one thread, "
        f"{found['date']}: {found['operations'] / 1e9:.2f} G operations in matrix products, "
        f"{found['share_of_peak']:.0%} of the measured peak of {found['peak'] / 1e9:.0f} G a second"
    )
    parts = sorted(found["parts"].items(), key=lambda item: -item[1])
    lines = [[name, f"{ms:.1f}", f"{ms / found['milliseconds']:.0%}"] for name, ms in parts]
    whole = ["a step", f"{found['milliseconds']:.1f}", "100%"]
    return to_markdown(Grid(title, ["part", "ms", "share"], [lines, [whole]]))


def throughput(results: pathlib.Path) -> str:
    """Return the table of `evals throughput`, one section per context and batch size."""
    result = load(results / "throughput.json")
    config, machine = result.config, result.environment
    if lacking := [name for name in ("processor", "threads") if name not in machine]:
        raise ValueError(
            f"throughput.json does not say what it ran on ({', '.join(lacking)}); run `evals throughput` again"
        )
    cases = dict.fromkeys(row.where for row in result.rows)
    sections = [[_throughput_line(result, case, method) for method in config["methods"]] for case in cases]
    where = f"{machine['processor']}, {machine['threads']} thread{'s' * (machine['threads'] != '1')}"
    title = (
        f"Milliseconds of a decode step, random weights of shape `{config['model']}` in {config['dtype']}, "
        f"{percent(config['budget'])} selected from layer {config['dense_layers']} on, {config['bits']}-bit codes, "
        f"queries in {config['planes']} planes, {where}: mean of {config['repeats']} turns of {config['steps']} steps "
        "[95 % interval]"
    )
    header = ["tokens x batch, method", "median, ms", "99 %, ms", "tokens/s", "sdpa / this method"]
    return to_markdown(Grid(title, [*header, "share of bandwidth", "KV, MB", "codes, MB", "density"], sections))


def _throughput_line(result: Result, case: str | None, method: str) -> list[str]:
    found = {row.metric: row for row in result.select(where=case, method=method)}
    base = [row.value for row in result.select(where=case, method="sdpa", metric="p50_ms")]
    over = f"{base[0] / found['p50_ms'].value:.2f}" if base else ""
    share, density = found["share_of_bandwidth"].value, found["p50_ms"].density
    kept = [f"{found[name].value / 1e6:.1f}" for name in ("kv_bytes", "code_bytes")]
    times = [*(cell_of(found[name]) for name in ("p50_ms", "p99_ms")), f"{found['tokens_per_s'].value:.1f}"]
    return [f"{case}, {method}", *times, over, percent(share), *kept, percent(1.0 if density is None else density)]
