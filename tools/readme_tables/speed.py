"""Tables of times that are of no single package: decode steps, a training step, the commands of README.md."""

import pathlib

from evals.grid import Grid, to_markdown

from readme_tables.stored import stored

_AS_FAST = 1.005  # within what the benchmark can tell


def install(results: pathlib.Path) -> str:
    """What the commands of README.md took in a fresh clone."""
    found = stored(results / "readme.json")
    title = (
        f"The commands below in a fresh clone, empty caches, Python {found['python']}, {found['cores']} cores, "
        f"{found['date']}; {found['disk'] / 1e9:.1f} GB installed"
    )
    lines = [[f"`{block['title']}`", f"{block['seconds'] / 60:.1f} minutes"] for block in found["blocks"]]
    return to_markdown(Grid(title, ["command", "took"], [lines]))


def speed(results: pathlib.Path) -> str:
    """How much faster a step is, by context: the attention of one layer, and a whole model."""
    names = ("attention", "model_decode", "model_break_even")
    attention, model, short = (stored(results / f"sparse_{name}.json") for name in names)
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
        f"Dense over sparse time of a decode step on a CPU ({attention['processor']}, {attention['threads']} thread), "
        f"{100 * attention['fraction']:g} % selected, random weights. Attention: a layer of "
        f"{attention['query_heads']} query and {attention['kv_heads']} KV heads of {attention['head_dim']}. Model: "
        f"Qwen2.5-0.5B's shape, {model['layers']} of 24 layers, bfloat16; a sparse step is as fast as "
        f"Hugging Face's dense one from about {even:,} tokens on"
    )
    dense = "against the fastest dense code we could write"
    header = [
        "context",
        f"attention in bfloat16, {dense}",
        f"attention in float32, {dense}",
        f"model, {dense}",
        "model, against Hugging Face's own step",
    ]
    return to_markdown(Grid(title, header, [lines]))


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
