"""Fill the tables of README.md, docs/results.md and the packages' READMEs from the results stored in docs/results.

    uv run tools/update_readme.py                                   # write the tables
    uv run tools/update_readme.py --from runs/demo runs/iou runs/ppl  # first store these runs, trimmed and rounded
    uv run tools/update_readme.py --from runs/all=ablations runs/paper/table-2=quest  # under names of their own
    uv run tools/update_readme.py --check                           # change nothing; exit 1 if a README is stale
    uv run packages/sparse-decode/benchmarks/attention.py --out docs/results/sparse_attention.json
    uv run packages/sparse-decode/benchmarks/model.py decode --out docs/results/sparse_model_decode.json
    uv run packages/sparse-decode/benchmarks/model.py break-even --out docs/results/sparse_model_break_even.json
    uv run packages/sparse-decode/benchmarks/model.py prefill --out docs/results/sparse_model_prefill.json
    uv run --with faiss-cpu packages/hashcore/examples/embeddings.py --out docs/results/hashcore_index.json
    uv run --with faiss-cpu packages/hashcore/benchmarks/cpu.py --cpu 1 --out docs/results/hashcore_cpu.json

A table stands between `<!-- results:NAME -->` and `<!-- end -->`; BLOCKS has the names.
"""

import argparse
import difflib
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

from evals import report
from evals.grid import Grid, to_markdown
from evals.result import Result, read_json, read_result, rows_from_json, rows_to_text, stated
from hashtrain.atomic import write_text

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
READMES = [ROOT / "README.md", ROOT / "docs" / "results.md", *sorted(ROOT.glob("packages/*/README.md"))]
BLOCK = re.compile(r"(<!-- results:(\S+) -->\n)(.*?)(<!-- end -->)", re.S)
_KEPT = {
    "ppl": ("perplexity", "perplexity_per_document", "perplexity_ratio", "kl", "nll"),
    "iou": ("iou", "recall", "mass"),
}
_DIGITS = 5
_CURVE_POINTS = 60
_AS_FAST = 1.005  # within what the benchmark can tell


def _of_run(name: str, grid: Callable[[Result], Grid]) -> Callable[[pathlib.Path], str]:
    return lambda results: to_markdown(grid(load(results / f"{name}.json")))


def _iou(heads: str) -> Callable[[Result], Grid]:
    return lambda result: report.iou_grid(result, result.config["budgets"][0], heads)


def _training(results: pathlib.Path, heads: str, name: str = "training") -> str:
    return to_markdown(report.training_grid(_stored(results / f"{name}.json"), heads))


def _magicpig(results: pathlib.Path) -> str:
    result = load(results / "magicpig.json")
    found = [report.ppl_grid(result), *(report.matched_grid(result, rival) for rival in result.config["match"])]
    return "\n\n".join(map(to_markdown, found))


def _glance(results: pathlib.Path) -> str:
    """The quality of each method at the first budget of the stored runs, best first."""
    ppl, training = load(results / "ppl.json"), _stored(results / "training.json")["hashers"]
    budget, rule = ppl.config["budgets"][0], ppl.config["rules"][0]

    def value(method: str, metric: str) -> float | None:
        wanted = (method, metric, (rule, budget) if method != "dense" else ("dense", None))
        return next((r.value for r in ppl.rows if (r.method, r.metric, (r.rule, r.budget)) == wanted), None)

    names = sorted(ppl.config["methods"], key=lambda name: value(name, "kl") or 0.0)
    lines = []
    for name in names:
        found = training.get(name.removesuffix("+remainder"))
        iou, mass = (f"{found['kv_head']['mean'][k]:.3f}" if found else "" for k in ("iou", "mass"))
        ratio, kl = value(name, "perplexity_ratio"), value(name, "kl")
        lines.append([name, iou, mass, f"{100 * ((ratio or 1) - 1):+.1f} %", f"{kl:.4f}"])
    count, length = ppl.config["documents"], ppl.config["context"]
    title = (
        f"{100 * budget:g} % of the visible tokens, 128-bit codes, demo model, held-out contexts of {length:,} tokens: "
        f"{_stored(results / 'training.json')['held_out']} for IoU and mass, {count} for perplexity, which is "
        f"{value('dense', 'perplexity'):.2f} dense"
    )
    header = ["method", "IoU with exact top-k", "attention mass found", "perplexity", "KL from dense, nats"]
    return to_markdown(Grid(title, header, [lines]))


def _install(results: pathlib.Path) -> str:
    """What the commands of README.md took in a fresh clone."""
    found = _stored(results / "readme.json")
    title = (
        f"The commands below in a fresh clone, empty caches, Python {found['python']}, {found['cores']} cores, "
        f"{found['date']}; {found['disk'] / 1e9:.1f} GB installed"
    )
    lines = [[f"`{block['title']}`", f"{block['seconds'] / 60:.1f} minutes"] for block in found["blocks"]]
    return to_markdown(Grid(title, ["command", "took"], [lines]))


def _speed(results: pathlib.Path) -> str:
    """How much faster a step is, by context: the attention of one layer, and a whole model."""
    names = ("attention", "model_decode", "model_break_even")
    attention, model, short = (_stored(results / f"sparse_{name}.json") for name in names)
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


def _training_step(results: pathlib.Path) -> str:
    found = _stored(results / "training_step.json")
    title = (
        f"Milliseconds of processor time of a step of `{found['hasher']}`, one layer of the demo model, one thread, "
        f"{found['date']}: {found['operations'] / 1e9:.2f} G operations in matrix products, "
        f"{found['share_of_peak']:.0%} of the measured peak of {found['peak'] / 1e9:.0f} G a second"
    )
    parts = sorted(found["parts"].items(), key=lambda item: -item[1])
    lines = [[name, f"{ms:.1f}", f"{ms / found['milliseconds']:.0%}"] for name, ms in parts]
    whole = ["a step", f"{found['milliseconds']:.1f}", "100%"]
    return to_markdown(Grid(title, ["part", "ms", "share"], [lines, [whole]]))


def _index_recall(results: pathlib.Path) -> str:
    found = _stored(results / "hashcore_index.json")
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


def _index_times(results: pathlib.Path) -> str:
    found = _stored(results / "hashcore_index.json")
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


_PLACES = {"memory": "from memory", "cache": "from cache"}


def _cpu_search(results: pathlib.Path) -> str:
    found = _stored(results / "hashcore_cpu.json")
    title = (
        f"Microseconds of processor time to search {found['bits']}-bit codes for the best 2 % of the keys, one thread, "
        f"{found['processor']}, {found['date']}. Ratios are medians, of processor and (elapsed) time"
    )
    header = ["keys", "queries", "codes", "search", "faiss", "faiss / search", "score, torch.topk", "its / search"]
    bodies = [
        [
            [
                f"{row['n']:,}",
                str(row["queries"]),
                words,
                *(f"{at['microseconds'][name]:,.0f}" for name in ("search", at["faiss"])),
                _two_clocks(at["over_faiss"]),
                f"{at['microseconds']['torch.topk']:,.0f}",
                _two_clocks(at["over_torch"]),
            ]
            for row in found["search"]
            for at in [row[place]]
        ]
        for place, words in _PLACES.items()
    ]
    return to_markdown(Grid(title, header, bodies))


def _cpu_score(results: pathlib.Path) -> str:
    found = _stored(results / "hashcore_cpu.json")
    group = found["score"][0]["group"]
    title = f"Microseconds of processor time to score the same keys, and ratios as above. The group has {group} queries"
    ratios = {
        "score / read": "over_read",
        "group in one call / planes": "one call_over_grouped",
        f"{group} calls / planes": "calls_over_grouped",
    }
    works = {"read": "read only", "score": "score, 1 query", "grouped": "score, group in 3 planes"}
    bodies = [
        [
            [
                f"{row['n']:,}",
                words,
                *(f"{row[place]['microseconds'][name]:,.0f}" for name in works),
                *(_two_clocks(row[place][name]) for name in ratios.values()),
            ]
            for row in found["score"]
        ]
        for place, words in _PLACES.items()
    ]
    return to_markdown(Grid(title, ["keys", "codes", *works.values(), *ratios], bodies))


def _two_clocks(ratio: dict[str, float]) -> str:
    return f"{ratio['processor']:.2f} ({ratio['wall']:.2f})"


def _sparse_attention(results: pathlib.Path) -> str:
    found = _stored(results / "sparse_attention.json")
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


def _model_title(found: dict[str, Any]) -> str:
    return (
        f"Qwen2.5-0.5B's shape, {found['layers']} of 24 layers, bfloat16, {100 * found['fraction']:g} % selected, "
        f"{found['threads']} thread, {found['processor']}, {found['date']}"
    )


def _model_decode(results: pathlib.Path) -> str:
    found = _stored(results / "sparse_model_decode.json")
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
        "Hugging Face's, timed once",
        "dense / sparse",
        "bytes allow",
        "share",
    ]
    return to_markdown(Grid(title, header, [lines]))


def _break_even(results: pathlib.Path) -> str:
    found = _stored(results / "sparse_model_break_even.json")
    title = f"Times of a decode step over those of the model as it is. {_model_title(found)}, {found['repeats']} steps"
    lines = [
        [f"{row['n']:,}", f"{row['dense_ms']:.1f} ms", *(_quartiles(row[name]) for name in ("sparse", "attached"))]
        for row in found["rows"]
    ]
    header = ["tokens", "as it is", "sparse", "attached, dense below the break-even"]
    return to_markdown(Grid(title, header, [lines]))


def _prefill(results: pathlib.Path) -> str:
    found = _stored(results / "sparse_model_prefill.json")
    title = f"Seconds of processor time of prefill. {_model_title(found)}, median of {found['repeats']}"
    lines = [
        [f"{row['n']:,}", *(f"{1e-3 * row[name]:.1f}" for name in ("dense_ms", "attached_ms")), _quartiles(row)]
        for row in found["rows"]
    ]
    return to_markdown(Grid(title, ["tokens", "as it is", "attached", "ratio"], [lines]))


def _quartiles(ratio: dict[str, float]) -> str:
    return f"{ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


BLOCKS: dict[str, Callable[[pathlib.Path], str]] = {
    "glance": _glance,
    "speed": _speed,
    "install": _install,
    "iou": _of_run("iou", _iou("kv_head")),
    "iou-query-heads": _of_run("iou", _iou("query_head")),
    "ppl": _of_run("ppl", report.ppl_grid),
    "ppl-pairs": _of_run("ppl", lambda result: report.ppl_pairs_grid(result, "transform")),
    "ppl-pairs-remainder": _of_run("ppl", lambda result: report.ppl_pairs_grid(result, "transform+remainder")),
    "remainder": lambda results: to_markdown(report.remainder_grid(_stored(results / "training.json"))),
    "ablations": lambda results: to_markdown(report.hashers_grid(_stored(results / "ablations.json"))),
    "recipe": lambda results: _training(results, "kv_head", "recipe"),
    "quest": _of_run("quest", report.ppl_grid),
    "magicpig": _magicpig,
    "training-step": _training_step,
    "training": lambda results: _training(results, "kv_head"),
    "training-query-heads": lambda results: _training(results, "query_head"),
    "hashcore-cpu-search": _cpu_search,
    "hashcore-cpu-score": _cpu_score,
    "sparse-attention": _sparse_attention,
    "sparse-break-even": _break_even,
    "sparse-model-decode": _model_decode,
    "sparse-prefill": _prefill,
    "hashcore-index-recall": _index_recall,
    "hashcore-index-times": _index_times,
}


def render(text: str, results: pathlib.Path = RESULTS) -> str:
    """Return a README with every table filled. Raises: ValueError if a block or its result is unknown."""
    if text.count("<!-- results:") != len(BLOCK.findall(text)):
        raise ValueError("a results block is malformed: expected `<!-- results:NAME -->`, its lines, `<!-- end -->`")

    def fill(match: re.Match[str]) -> str:
        opening, name, _, end = match.groups()
        if name not in BLOCKS:
            raise ValueError(f"unknown block results:{name}: expected one of {', '.join(BLOCKS)}")
        return f"{opening}\n{BLOCKS[name](results)}\n\n{end}"

    return BLOCK.sub(fill, text)


def store(run: pathlib.Path, results: pathlib.Path = RESULTS, name: str = "") -> pathlib.Path:
    """Copy what a table needs of a run, rounded, as `name` or the run's kind.

    Returns: the file. Raises: ValueError if there is no finished run.
    """
    if (run / "metrics.json").is_file():
        target, text = (
            results / f"{name or 'training'}.json",
            json.dumps(_trim_metrics(read_json(run / "metrics.json", "run again")), indent=1),
        )
    else:
        result = read_result(run)
        task = result.config["task"]
        rows = [row for row in result.rows if row.metric in _KEPT[task] and row.head is None]
        table = json.loads(rows_to_text(rows))
        lines = ",\n".join(json.dumps(_rounded(line)) for line in table["rows"])
        head = {"config": result.config, "environment": result.environment, "columns": table["columns"]}
        target, text = results / f"{name or task}.json", f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n]}}'
    write_text(target, text + "\n")
    return target


def load(path: pathlib.Path) -> Result:
    """Read a stored result."""
    data = _stored(path)
    return Result(stated(data["config"]), data["environment"], rows_from_json(data))


def _stored(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(
            f"a README has a table of {path.name}, expected it in {path.parent.name}; store a run with --from"
        )
    return read_json(path, "store the run again with --from")


def _trim_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Leave out the per-head lists, and keep the mean loss curve of the layers as _CURVE_POINTS means."""
    hashers = {}
    for name, found in metrics["hashers"].items():
        layers = {
            heads: [{k: v for k, v in layer.items() if not k.endswith("_by_head")} for layer in found[heads]["layers"]]
            for heads in ("kv_head", "query_head", "remainder")
        }
        hashers[name] = {heads: {"layers": layers[heads], "mean": found[heads]["mean"]} for heads in layers}
        hashers[name]["curve"] = _curve(found["losses"])
    return _rounded({**metrics, "hashers": hashers})


def _curve(losses: list[list[float]]) -> list[float]:
    """Average the layers' losses, then stretches of steps; empty for a hasher that is not trained."""
    steps = [sum(column) / len(column) for column in zip(*losses, strict=True)]
    size = max(1, len(steps) // _CURVE_POINTS)
    return [sum(part) / len(part) for i in range(0, len(steps), size) if (part := steps[i : i + size])]


def _rounded(data: Any) -> Any:
    if isinstance(data, float):
        return float(f"{data:.{_DIGITS}g}")
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    return [_rounded(value) for value in data] if isinstance(data, list) else data


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a README is stale")
    parser.add_argument("--from", dest="runs", nargs="+", default=[], help="RUN or RUN=NAME to store first")
    given = parser.parse_args(arguments)
    if given.check and given.runs:
        parser.error("--check changes nothing, --from stores runs: give one of them")
    try:
        for run, _, name in (given_run.partition("=") for given_run in given.runs):
            print(f"stored {store(pathlib.Path(run), name=name).relative_to(ROOT)}")
        texts = {path: path.read_text(encoding="utf-8") for path in READMES}
        fresh = {path: render(text) for path, text in texts.items()}
    except (ValueError, OSError) as error:
        print(f"update_readme: {error}", file=sys.stderr)
        return 2
    stale = [path for path in READMES if texts[path] != fresh[path]]
    for path in stale:
        if given.check:
            before, after = texts[path].splitlines(True), fresh[path].splitlines(True)
            sys.stdout.writelines(difflib.unified_diff(before, after, str(path.relative_to(ROOT)), "fresh"))
        else:
            write_text(path, fresh[path])
    return int(given.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
