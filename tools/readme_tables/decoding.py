"""Tables of decode steps and searches: sparse-decode, sparse-serve and hashcore's index."""

import pathlib
from typing import Any

from evals.grid import Grid, to_markdown

from readme_tables.stored import stored


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


_BESIDE = ("ours", "ours, dense", "llama.cpp", "transformers")


def beside_llama_cpp(results: pathlib.Path) -> str:
    """Return the table of decode steps beside llama.cpp and transformers, from benchmarks/llama_cpp.py."""
    runs = [stored(results / f"{name}.json") for name in ("llama_cpp", "llama_cpp_intel", "llama_cpp_qwen")]
    first = runs[0]
    built = f" (built for {', '.join(name for name in first['llama_cpp_uses'] if name.startswith('AVX'))})"
    versions = ", ".join(
        f"{name} {number}{built * (name == 'xllamacpp')}" for name, number in first["versions"].items()
    )
    title = (
        f"Milliseconds a decode step, 16-bit weights and caches, 2 % selected, {first['threads']} threads, "
        f"{versions}; median of rounds in turns (the least to the greatest); "
        "`about`: extrapolated by a line through llama.cpp's shorter contexts"
    )
    header = ["processor", "model, tokens", *_BESIDE, "llama.cpp / ours", "transformers / ours"]
    return to_markdown(Grid(title, header, [[_beside_llama_cpp(run, row) for row in run["rows"]] for run in runs]))


def _beside_llama_cpp(run: dict[str, Any], row: dict[str, Any]) -> list[str]:
    steps = row["steps"]
    about = "about " if steps["llama.cpp"].get("predicted") else ""
    taken = [_median(steps[name]) if name in steps else "" for name in _BESIDE]
    ratios = [f"{steps[name]['ms'] / steps['ours']['ms']:.2f} x" for name in ("llama.cpp", "transformers")]
    taken[2], ratios[0] = about + taken[2], about + ratios[0]
    return [f"{run['processor']}, {run['date']}", f"{run['model']}, {row['tokens']:,}", *taken, *ratios]


def _median(step: dict[str, Any]) -> str:
    """Return a median, and the least and the greatest of its rounds if there were any."""
    ends = f" ({min(step['rounds']):,.0f} to {max(step['rounds']):,.0f})" if step["rounds"] else ""
    return f"{step['ms']:,.1f}{ends}"


def serving(results: pathlib.Path) -> str:
    """Return the table of decode step times by processor and context, from benchmarks/throughput.py."""
    runs = [stored(results / f"{name}.json") for name in ("serving_without_amx", "serving")]
    first = runs[0]
    shape, what = first["shape"], "Processor milliseconds" if first["processor_time"] else "Milliseconds"
    title = (
        f"{what} of a decode step of {first['requests']} requests: {shape['num_hidden_layers']} layers of "
        f"{shape['num_attention_heads']} query and {shape['num_key_value_heads']} KV heads of {shape['head_dim']} in "
        f"bfloat16, random weights, {first['bits']}-bit codes of an untrained `{first['hasher']}`, "
        f"{100 * first['fraction']:g} % selected; contexts below {first['dense_below']:,} tokens stay dense, so their "
        "rows show the overhead"
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
    compared = total["answers"] - alone
    equal = f"{total['equal']:,}" + f" of {compared:,} compared" * bool(alone) if compared else "not compared"
    seen = ", ".join(text.format(total[key]) for key, text in _SEEN.items() if total[key])
    wrong = str(len(part["wrong"]))
    return [name, f"{total['answers']:,}", equal, f"{total['ties']:,}", wrong, seen, f"{part['seconds']:,.0f}"]


def index_recall(results: pathlib.Path) -> str:
    found = stored(results / "hashcore_index.json")
    sets = found["recall"]
    title = (
        f"Recall@{found['k']} of exact search by cosine, {found['count']:,} embeddings of {found['dim']} numbers in "
        f"{found['bits']} bits, {found['queries']} queries, mean and standard error"
    )
    lines = [
        [
            "code against code" if row["planes"] == 0 else f"{row['planes']} plane{'s' * (row['planes'] > 1)}",
            str(row["rerank"] or "-"),
            *(f"{at['recall']:.3f} ± {at['error']:.3f}" for at in rows),
        ]
        for row, rows in ((rows[0], rows) for rows in zip(*sets.values(), strict=True))
    ]
    return to_markdown(Grid(title, ["query", "rerank", *(f"{name} spread" for name in sets)], [lines]))


def index_times(results: pathlib.Path) -> str:
    found = stored(results / "hashcore_index.json")
    columns, file = found["times"], found["file"]
    index, vectors = (f"{found[name] / 1e6:,.0f} MB" for name in ("index_bytes", "vector_bytes"))
    verified, unverified = (1e3 * file[name] for name in ("load_seconds", "load_unverified_seconds"))
    title = (
        f"Milliseconds of processor time a query for the best {found['k']} of the same {found['count']:,} codes, one "
        f"thread, {found['processor']}, {found['date']}. The index takes {index}, the float32 vectors {vectors}. "
        f"Adding takes {found['add_microseconds']:.1f} us a vector, saving {file['save_seconds']:.2f} s, "
        f"loading from a warm cache {verified:.0f} ms with verification and {unverified:.1f} ms without"
    )
    names = columns[0]["milliseconds"]
    lines = [[name, *(f"{at['milliseconds'][name]:.2f}" for at in columns)] for name in names]
    ratios = ["faiss / BitIndex on codes, median ratio", *(f"{at['faiss_over_codes']:.2f}" for at in columns)]
    header = ["search", *(f"{at['queries']} quer{'y' if at['queries'] == 1 else 'ies'} a call" for at in columns)]
    return to_markdown(Grid(title, header, [lines, [ratios]]))
