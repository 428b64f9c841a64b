"""Tables of sparse-decode: times of attention, of decode steps and of prefill."""

import pathlib
from typing import Any

from evals.grid import Grid, to_markdown

from readme_tables.stored import stored


def sparse_attention(results: pathlib.Path) -> str:
    found = stored(results / "sparse_attention.json")
    title = (
        f"Milliseconds of processor time of a step of one layer, {found['query_heads']} query heads, "
        f"{found['kv_heads']} KV heads of {found['head_dim']}, {100 * found['fraction']:g} % selected, "
        f"{found['threads']} thread, {found['processor']}, {found['date']}, median of {found['repeats']}"
    )
    lines = [
        [
            f"{row['n']:,}",
            row["dtype"],
            f"{row['sparse_ms']:.1f}",
            *(f"{taken:.1f}" for taken in row["dense_ms"].values()),
            f"{row['ratio']:.1f}",
        ]
        for row in found["rows"]
    ]
    header = ["tokens", "type", "sparse", *found["rows"][0]["dense_ms"], "fastest dense / sparse"]
    return to_markdown(Grid(title, header, [lines]))


def shortlist(results: pathlib.Path) -> str:
    found = stored(results / "shortlist.json")
    n, planes = found["rows"][0]["n"], found["rows"][0]["planes"]
    title = (
        f"Search of one row for the best {100 * found['fraction']:g} % of {n:,} keys, {planes} planes of 128 bits, one "
        f"thread, {found['processor']}, {found['date']}: all keys in full, and shortlists of so many times as many; "
        f"ratios are medians"
    )
    lines = []
    for row in found["rows"]:
        line = [str(row["layer"]), f"{row['microseconds']['None']:.0f} us"]
        for times, ratio in row["ratio"].items():
            line += [f"{ratio:.2f} x", f"{100 * row['found'][times]:.1f} %"]
        lines.append(line)
    asked = [name for times in found["rows"][0]["ratio"] for name in (f"{times} x: faster", "of its selection")]
    return to_markdown(Grid(title, ["layer", "in full", *asked], [lines]))


def exact(results: pathlib.Path) -> str:
    lines = []
    for row in stored(results / "exact.json")["summary"]:
        counts = f"{row['context']:,}", str(row["k"]), f"{row['prompts']} x {row['tokens'] // row['prompts']}"
        made = f"{100 * row['acceptance']:.1f} %", f"{row['tokens_per_check']:.2f}"
        apart = f"within {row['largest_ulp']:g} ulp" if row["largest_ulp"] else "exact ties"
        differ = f"{row['differ']} ({apart})" if row["differ"] else "none"
        lines.append([row["dtype"], *counts, *made, differ])
    title = "Differences between the dense model's logits are in units in the last place (ulp) of its dtype"
    header = ["type", "context", "drafted", "prompts x tokens", "accepted", "tokens a check", "tokens that differ"]
    return to_markdown(Grid(title, header, [lines]))


def exact_speed(results: pathlib.Path) -> str:
    found = stored(results / "exact_speed.json")
    title = (
        f"Milliseconds a token at an acceptance of {100 * found['accepted']:g} %, at most {found['most']} drafts, "
        f"random weights in bfloat16, {found['threads']} threads, {found['processor']}, {found['date']}, medians of "
        f"{found['turns']} turns; a draft and a check of three rows in times of a dense step, measured and predicted"
    )
    header = ["model, tokens", "transformers", "dense", "exact", "dense / exact", "predicted", "draft", "check"]
    return to_markdown(Grid(title, header, [[_exact_speed(row) for row in found["rows"]]]))


def _exact_speed(row: dict[str, Any]) -> list[str]:
    taken = [f"{row['ms'][way]:,.1f}" for way in ("transformers", "dense", "exact")]
    gains = [f"{row['gain']['exact']:.2f} x", f"{row['predicted']['gain']:.2f} x"]
    passes = [row["passes"][name] for name in ("draft", "check 3")]
    costs = [f"{cost['measured']:.2f}, {cost['predicted']:.2f}" for cost in passes]
    return [f"{row['model']}, {row['n']:,}", *taken, *gains, *costs]


def _model_title(found: dict[str, Any]) -> str:
    return (
        f"Qwen2.5-0.5B's shape, {found['layers']} of 24 layers, bfloat16, {100 * found['fraction']:g} % selected, "
        f"{found['threads']} thread, {found['processor']}, {found['date']}"
    )


def model_decode(results: pathlib.Path) -> str:
    found = stored(results / "sparse_model_decode.json")
    title = f"Milliseconds of processor time of a decode step. {_model_title(found)}, median of {found['repeats']}"
    lines = [
        [
            f"{row['n']:,} x {row['batch']}",
            *(f"{row[name]:,.0f}" for name in ("sparse_ms", "dense_ms", "shipped_ms")),
            f"{row['ratio']:.2f}",
            f"{row['allowed']:.2f}",
            f"{100 * row['share']:.0f} %",
        ]
        for row in found["rows"]
    ]
    header = [
        "tokens",
        "sparse",
        "fastest dense",
        f"Hugging Face's, best of {found['rows'][0]['shipped_steps']}",
        "dense / sparse",
        "bytes allow",
        "reached",
    ]
    return to_markdown(Grid(title, header, [lines]))


def break_even(results: pathlib.Path) -> str:
    found = stored(results / "never_slower.json")
    title = (
        f"Times of a decode step over those of the model as it is. {found['model']}, bfloat16, 2 % selected, "
        f"{found['threads']} threads, {found['processor']}, {found['date']}, {found['repeats']} steps"
    )
    lines = [
        [f"{row['n']:,}", f"{row['as it is']['ms']:.1f} ms", *(_quartiles(row[way]) for way in ("sparse", "attached"))]
        for row in found["rows"]
    ]
    return to_markdown(Grid(title, ["tokens", "as it is", "always sparse", "attached"], [lines]))


def beside_llama_cpp(results: pathlib.Path) -> str:
    both = [stored(results / f"{name}.json") for name in ("llama_cpp", "llama_cpp_qwen")]
    found = both[0]
    built = f" (built for {', '.join(name for name in found['llama_cpp_uses'] if name.startswith('AVX'))})"
    versions = ", ".join(
        f"{name} {number}{built * (name == 'xllamacpp')}" for name, number in found["versions"].items()
    )
    title = (
        f"Milliseconds a decode step, 16-bit weights and caches, 2 % selected, {found['threads']} threads, "
        f"{found['processor']}, {found['date']}, {versions}; median of rounds in turns; "
        "`about`: extrapolated by a line through llama.cpp's shorter contexts"
    )
    sections = [[_beside_llama_cpp(run["model"], row) for row in run["rows"]] for run in both]
    header = ["model, tokens", "ours", "llama.cpp", "transformers", "llama.cpp / ours", "transformers / ours"]
    return to_markdown(Grid(title, header, sections))


def _beside_llama_cpp(model: str, row: dict[str, Any]) -> list[str]:
    steps = row["steps"]
    taken = [steps[name]["ms"] for name in ("ours", "llama.cpp", "transformers")]
    about = "about " if steps["llama.cpp"].get("predicted") else ""
    ratios = [f"{other / taken[0]:.2f} x" for other in taken[1:]]
    plain = [f"{ms:,.1f}" for ms in taken]
    return [f"{model}, {row['tokens']:,}", plain[0], about + plain[1], plain[2], about + ratios[0], ratios[1]]


def prefill(results: pathlib.Path) -> str:
    found = stored(results / "sparse_model_prefill.json")
    title = f"Seconds of processor time of prefill. {_model_title(found)}, median of {found['repeats']}"
    lines = [
        [f"{row['n']:,}", *(f"{1e-3 * row[name]:.1f}" for name in ("dense_ms", "attached_ms")), _quartiles(row)]
        for row in found["rows"]
    ]
    return to_markdown(Grid(title, ["tokens", "as it is", "attached", "ratio"], [lines]))


def _quartiles(ratio: dict[str, float]) -> str:
    return f"{ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
