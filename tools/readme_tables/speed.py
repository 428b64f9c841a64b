"""Tables of times: decode steps, searches, serving, a training step, the commands of README.md."""

import pathlib
from collections.abc import Sequence
from typing import Any

from evals.tables import Grid, to_markdown

from readme_tables.stored import stored

TRAINED_ON = 8192  # tokens, the max_position_embeddings of SmolLM2
BESIDE = ("ours", "ours, dense", "llama.cpp", "transformers")
AS_FAST = 1.005  # the benchmark's resolution
PARTS = ("exact", "budgets", "crossing", "arrivals", "ranks", "preemption", "poison", "others", "clients", "start")
SEEN = {
    "preemptions": "{:,} preemptions",
    "poisoned": "{:,} pages poisoned",
    "abandoned": "{:,} abandoned",
    "lasted": "{:,.0f} s of requests",
}


def faster(results: pathlib.Path) -> str:
    """Return the headline's two points on speed: beside other programs, and of larger shapes."""
    attention, model = (stored(results, f"sparse_{name}") for name in ("attention", "model_decode"))
    step = max((row for row in model["rows"] if row["batch"] == 1), key=lambda row: row["n"])
    layer = next(row for row in attention["rows"] if (row["n"], row["dtype"]) == (step["n"], "bfloat16"))
    llama, intel = stored(results, "llama_cpp"), stored(results, "llama_cpp_intel")
    ms = {row["tokens"]: {name: taken["ms"] for name, taken in row["steps"].items()} for row in llama["rows"]}
    other = {row["tokens"]: {name: taken["ms"] for name, taken in row["steps"].items()} for row in intel["rows"]}
    newest = [name for name in llama["llama_cpp_uses"] if name.startswith("AVX")][-1]
    lengths = TRAINED_ON, max(ms)

    def beside(tokens: int, *names: str) -> str:
        others = ", ".join(f"{name} {ms[tokens][of]:,.0f}" for name, of in zip(names, BESIDE[1:], strict=True))
        return f"{ms[tokens]['ours']:.0f} ms at {tokens:,} ({others})"

    first = beside(lengths[0], "our dense code", f"llama.cpp's {newest} build", "transformers")
    last = beside(lengths[1], "our dense code", "llama.cpp", "transformers")
    lost = [(n, name) for n in ms for name in ms[n] if not name.startswith("ours") and ms[n][name] < ms[n]["ours"]]
    said = f"At {max(lost)[0]:,}, {max(lost)[1]} is faster." if lost else "Ours is the fastest at all lengths measured."
    there = ", ".join(
        f"{name} {' and '.join(f'{other[n][name]:.0f}' for n in lengths)}" for name in (BESIDE[0], *BESIDE[2:])
    )
    return (
        f"- **How much faster:** on two cores of an {_processor(llama)}, 16-bit weights, a token of SmolLM2-135M takes "
        f"{first} and {last}; trained on {TRAINED_ON:,}. {said} On an {_processor(intel)}: {there}.\n"
        f"- **Random weights,** one core, {step['n']:,} tokens: attention is {layer['ratio']:.1f} times as fast as our "
        f"fastest dense code, a step of Qwen2.5-0.5B's shape ({model['layers']} of 24 layers) {step['ratio']:.1f} "
        "times."
    )


def _processor(run: dict[str, Any]) -> str:
    """Name the processor of a run, without its maker's marks."""
    return run["processor"].replace("(R)", "").removesuffix(" Processor")


def needs(results: pathlib.Path) -> str:
    """Return a sentence on the time and disk that the first two commands of README.md take."""
    found = stored(results, "readme")
    first, second = (f"{block['seconds'] / 60:.0f}" for block in found["blocks"][:2])
    return (
        f"These took {first} and {second} minutes on {found['cores']} cores ({found['processor']}), and "
        f"{found['disk'] / 1e9:.1f} GB of disk."
    )


def speed(results: pathlib.Path) -> str:
    """Return the table of speed-ups by context: attention of one layer, and a whole model."""
    names = ("sparse_attention", "sparse_model_decode", "never_slower")
    attention, model, short = (stored(results, name) for name in names)
    whole = {row["n"]: row for row in model["rows"] if row["batch"] == 1}
    even = min(row["n"] for row in short["rows"] if row["sparse"]["ratio"] <= AS_FAST)
    by_length: dict[int, dict[str, float]] = {}
    for row in attention["rows"]:
        by_length.setdefault(row["n"], {})[row["dtype"]] = row["ratio"]
    lines = []
    for n, ratios in sorted(by_length.items()):
        layer, step = [f"{ratios[kind]:.1f} x" for kind in ("bfloat16", "float32")], whole.get(n)
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
    found = stored(results, "training_step")
    title = (
        f"Milliseconds of processor time of a step of `{found['hasher']}`, one layer of the demo model, one thread, "
        f"{found['date']}: {found['operations'] / 1e9:.2f} G operations in matrix products, "
        f"{found['share_of_peak']:.0%} of the measured peak of {found['peak'] / 1e9:.0f} G a second"
    )
    parts = sorted(found["parts"].items(), key=lambda item: -item[1])
    lines = [[name, f"{ms:.1f}", f"{ms / found['milliseconds']:.0%}"] for name, ms in parts]
    whole = ["a step", f"{found['milliseconds']:.1f}", "100%"]
    return to_markdown(Grid(title, ["part", "ms", "share"], [lines, [whole]]))


def llama_cpp(results: pathlib.Path) -> str:
    """Return the table of decode steps beside llama.cpp and transformers, from benchmarks/llama_cpp.py."""
    runs = [stored(results, name) for name in ("llama_cpp", "llama_cpp_intel", "llama_cpp_qwen")]
    first = runs[0]
    built = f" (built for {', '.join(name for name in first['llama_cpp_uses'] if name.startswith('AVX'))})"
    versions = ", ".join(f"{name} {at}{built * (name == 'xllamacpp')}" for name, at in first["versions"].items())
    title = (
        f"Milliseconds a decode step, 16-bit weights and caches, 2 % selected, {first['threads']} threads, "
        f"{versions}; median of rounds in turns (the least to the greatest); "
        "`about`: extrapolated by a line through llama.cpp's shorter contexts"
    )
    header = ["processor", "model, tokens", *BESIDE, "llama.cpp / ours", "transformers / ours"]
    return to_markdown(Grid(title, header, [[_beside(run, row) for row in run["rows"]] for run in runs]))


def _beside(run: dict[str, Any], row: dict[str, Any]) -> list[str]:
    steps = row["steps"]
    about = "about " if steps["llama.cpp"].get("predicted") else ""
    taken = [_median(steps[name]) if name in steps else "" for name in BESIDE]
    ratios = [f"{steps[name]['ms'] / steps['ours']['ms']:.2f} x" for name in BESIDE[2:]]
    taken[2], ratios[0] = about + taken[2], about + ratios[0]
    return [f"{run['processor']}, {run['date']}", f"{run['model']}, {row['tokens']:,}", *taken, *ratios]


def _median(step: dict[str, Any]) -> str:
    """Return a median, and the least and the greatest of its rounds if there were any."""
    ends = f" ({min(step['rounds']):,.0f} to {max(step['rounds']):,.0f})" if step["rounds"] else ""
    return f"{step['ms']:,.1f}{ends}"


def serving(results: pathlib.Path) -> str:
    """Return the table of decode step times by processor and context, from benchmarks/throughput.py."""
    runs = [stored(results, name) for name in ("serving_without_amx", "serving")]
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
    where = f"{_machine(found)}, {found['engine']}, {found['date']}" + ", taken beside other work" * found["busy"]
    return [
        [where, f"{row['context']:,}", f"{row['stock']:.1f}", f"{row['ours']:.1f}", f"{row['ratio']:.2f} x"]
        for row in sorted(found["rows"], key=lambda row: row["context"])
    ]


def serving_checks(results: pathlib.Path) -> str:
    """Return the table of what the serving checks found, by part, from tools/check_serving.py and check_server.py."""
    found = stored(results, "serving_checks")["parts"]
    lines = [_part(name, found[name]) for name in PARTS if name in found]
    machines = sorted({(part["engine"], part["processor"], part["hash"]) for part in found.values()})
    dates = sorted({part["date"] for part in found.values()})
    title = (
        f"What the checks found, {'; '.join(f'{a}, {b}, {c} hash' for a, b, c in machines)}, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}"
    )
    header = ["part", "answers", "equal", "at near-ties", "wrong", "seen", "seconds"]
    return to_markdown(Grid(title, header, [lines]))


def _part(name: str, part: dict[str, Any]) -> list[str]:
    total = {key: sum(row[key] for row in part["rows"] if key in row) for key in ("answers", "equal", "ties", *SEEN)}
    # Rows whose answers have nothing to be equal to: preempted ones below 100 %, and the README's.
    alone = sum(row["answers"] for row in part["rows"] if "equal" not in row)
    compared = total["answers"] - alone
    equal = f"{total['equal']:,}" + f" of {compared:,} compared" * bool(alone) if compared else "not compared"
    seen = ", ".join(text.format(total[key]) for key, text in SEEN.items() if total[key])
    wrong = str(len(part["wrong"]))
    return [name, f"{total['answers']:,}", equal, f"{total['ties']:,}", wrong, seen, f"{part['seconds']:,.0f}"]


def index_recall(results: pathlib.Path) -> str:
    found = stored(results, "hashcore_index")
    sets: dict[str, Sequence[Any]] = found["recall"]
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
    found = stored(results, "hashcore_index")
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
