"""The table of sparse-serve: decode steps of a serving engine, with and without sparse attention."""

import pathlib

from evals.grid import Grid, to_markdown

from readme_tables.stored import stored


def serving(results: pathlib.Path) -> str:
    """Return the table of decode step times by context, from benchmarks/throughput.py."""
    found = stored(results / "serving.json")
    shape, threads = found["shape"], found["threads"]
    lines = [
        [f"{row['context']:,}", f"{row['stock']:.1f}", f"{row['ours']:.1f}", f"{row['ratio']:.2f} x"]
        for row in sorted(found["rows"], key=lambda row: row["context"])
    ]
    what = "Processor milliseconds" if found["processor_time"] else "Milliseconds"
    title = (
        f"{what} of a decode step of {found['requests']} requests in {found['engine']}, {found['processor']}, "
        f"{threads} thread{'s' * (threads != 1)}, {found['date']}{', taken beside other work' * found['busy']}: "
        f"{shape['num_hidden_layers']} layers of {shape['num_attention_heads']} query and "
        f"{shape['num_key_value_heads']} KV heads of {shape['head_dim']} in bfloat16, random "
        f"weights, {found['bits']}-bit codes of an untrained `{found['hasher']}`, "
        f"{found['fraction']:.0%} selected from {found['dense_below']:,} tokens on"
    )
    return to_markdown(Grid(title, ["tokens each", "vLLM", "with selection", "vLLM / it"], [lines]))
