"""Functions of the templates in `tables.toml`: what is read from stored results, and how it is written."""

import pathlib
import re
import tomllib
from functools import partial
from typing import Any

from evals.methods import REMAINDER
from evals.results import Result, Row
from evals.rivals.table import RIVALS
from evals.tables import percent, protocol, signed_percent
from hashtrain.run.settings import PAPER
from sparse_decode.sums import FOLD

from readme_tables.stored import load, stored

OURS = "transform+remainder"
HEAD_DIMS = {"qwen2.5-coder-0.5b": 64, "qwen2.5-coder-1.5b": 128}
NAMES = {
    "smollm2": "SmolLM2-135M-Instruct",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B-Instruct",
}
"""Models by the name of their folder."""
ITEMS = pathlib.Path(__file__).resolve().parents[2] / "packages" / "evals" / "paper" / "items.toml"


def functions(results: pathlib.Path) -> dict[str, Any]:
    """Return what templates may call, by name."""
    found = {"load": partial(load, results), "stored": partial(stored, results), "cost": partial(cost, results)}
    named = [at, both, built_for, by_kl, change, comparisons, excerpt, lost, machine, mean, other_families, percent]
    named += [printed, protocol, rounds, signed_percent, step_share, value, waits, whole, zip]
    return found | {"ours": OURS, "PAPER": PAPER, "NAMES": NAMES} | {one.__name__: one for one in named}


def excerpt(blocks: list[dict[str, Any]], command: str, *beginnings: str) -> str:
    """Return lines that a command of README.md printed: for each beginning, the first one."""
    lines = next(block["printed"] for block in blocks if block["title"].endswith(command))
    found = [next((x for x in lines if f"{x} ".startswith(f"{start} ")), None) for start in beginnings]
    if None in found:
        raise LookupError(f"expected {command} to print {beginnings[found.index(None)]}")
    return "\n".join(map(str, found))


# Runs of evals: at the first rule and budget of the run.


def _row(run: Result, method: str, metric: str) -> Row:
    first = {"rule": run.config["rules"][0], "budget": run.config["budgets"][0]}
    return run.one(method=method, metric=metric, against=None, **first)


def value(run: Result, method: str, metric: str) -> float:
    return _row(run, method, metric).value


def change(run: Result, method: str) -> str:
    """Return a method's change of perplexity."""
    return signed_percent(value(run, method, "perplexity_ratio"))


def cost(results: pathlib.Path, name: str, method: str) -> str:
    """Return a stored run's change of perplexity with a method, and its KL; blank if it has no such method."""
    run = load(results, name)
    if method not in run.config["methods"]:
        return ""
    return f"{change(run, method)} ({value(run, method, 'kl'):.4f})"


def by_kl(run: Result) -> list[str]:
    """Return a run's methods, the closest to dense first."""
    return sorted(run.config["methods"], key=lambda name: value(run, name, "kl"))


def mean(trained: dict[str, Any], method: str, metric: str) -> str:
    """Return a hasher's mean over layers, measured in its training; blank for what is no hasher."""
    found = trained["hashers"].get(method.removesuffix(REMAINDER))
    return f"{found['kv_head']['mean'][metric]:.3f}" if found else ""


def step_share(run: Result, method: str) -> float:
    """Return the bytes that a layer's step requests, as a share of all keys and values in 16 bits.

    A step at the middle of the scored rows reads all codes, the keys and values of the tokens selected, and the sums of
    the remainder. Of the oracle's search nothing is counted. Rivals read by their measured density.
    """
    config, row = run.config, _row(run, method, "kl")
    tokens = config["context"] - (config.get("scored") or config["context"] // 2) // 2
    name, width = method.removesuffix(REMAINDER), HEAD_DIMS[config["model"]]
    pair = 2 * 2 * width
    rival = RIVALS.get(name)
    bits = (row.bits or 0) if rival is None else rival.build().kept_bits(width)
    selected = row.budget if rival is None else row.density
    vectors, rounded, token = 16 * width, width**2 + 4 * width, 4 * width  # of the sums, in bytes
    folding = 2 * (vectors + 4 * width**2) + rounded + FOLD * token  # every `FOLD` steps
    sums = vectors + rounded + (FOLD + 1) / 2 * token + folding / FOLD  # tokens that are not in the sums yet are read
    sums = sums if method != name else 0
    return (tokens * bits / 8 + (selected or 0.0) * tokens * pair + sums) / (tokens * pair)


def comparisons(differences: list[dict[str, Any]], run: Result) -> list[dict[str, str]]:
    """Return the lines of differences between ours and rivals: `label`, and the difference of each metric.

    Args: differences: at budgets of their own; run: where ours read as many tokens.
    """
    found: dict[str, dict[str, str]] = {}

    def add(label: str, metric: str, value: float, low: float | None, high: float | None) -> None:
        interval = "" if low is None or high is None else f" [{low:+.3f}, {high:+.3f}]"
        found.setdefault(label, {"label": label})[metric] = f"{value:+.3f}{interval}"

    for entry in (x for x in differences if x["a"][0] == OURS):  # the others' hashers have changed since
        (ours, own), (rival, theirs) = entry["a"], entry["b"]
        label = f"{ours} at {percent(own)}, {rival} at {percent(theirs)}"
        add(label, entry["metric"], entry["mean"], entry["low"], entry["high"])
    for row in run.rows:
        if row.against and row.rule == f"as {row.against}":
            at = f"{row.method} and {row.against}, both at {percent(row.density or 0)}"
            add(at, row.metric, row.value, row.low, row.high)
    return list(found.values())


def printed() -> dict[str, dict[str, float]]:
    """Return the paper's perplexity on its first text, by table and line; table 5: Spotlight's over dense, by text."""
    items = tomllib.loads(ITEMS.read_text("utf-8"))["items"]
    _, header, *models = next(item["paper"] for item in items if item["name"] == "table 1")
    (cells,) = (line.split("|")[1:] for line in models if line.startswith("LLaMA3-8B"))
    found = zip(header.split("|")[1:], (float(cell.partition(" / ")[2]) for cell in cells), strict=True)
    tables = {"table 1": {name.replace("original", "dense"): number for name, number in found}}
    for item in items:
        for line in item.get("paper", [])[2:]:
            name, number, *_ = cells = line.split("|")
            if item["name"] == "table 5":
                for text, cell in zip(item["paper"][1].split("|")[1:], cells[1:], strict=True):
                    dense, sparse = map(float, cell.split(" / "))
                    tables.setdefault("table 5", {})[f"{name} {text}"] = sparse / dense
            if number.replace(".", "", 1).isdigit():
                tables.setdefault(item["name"], {})[name] = float(number)
    return tables


# Times.


def machine(found: dict[str, Any]) -> str:
    """Return the processor and threads of a stored benchmark: columns of one table may be from different machines."""
    return f"{found['processor']}, {found['threads']} thread{'s' * (found['threads'] != 1)}"


def at(batch: int, tokens: int) -> str:
    """Name a context and its batch size."""
    return f"{tokens:,}" if batch == 1 else f"{batch} x {tokens:,}"


def built_for(run: dict[str, Any]) -> list[str]:
    """Return the vector extensions that a run's llama.cpp used."""
    return [name for name in run["llama_cpp_uses"] if name.startswith("AVX")]


def rounds(step: dict[str, Any] | None) -> str:
    """Return a median, and the least and the greatest of its rounds if there were any; blank for no step."""
    if step is None:
        return ""
    ends = f" ({min(step['rounds']):,.0f} to {max(step['rounds']):,.0f})" if step["rounds"] else ""
    return f"{step['ms']:,.1f}{ends}"


def waits(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the seconds of each way's prompt and tokens at a length; llama.cpp's without the name of its file."""
    return {name.partition(",")[0]: (taken["prompt_s"], taken["tokens_s"]) for name, taken in row["methods"].items()}


def both(row: dict[str, Any], way: str) -> str:
    """Return the seconds of a way's prompt and of its tokens; blank if it did not run."""
    prompt, tokens = waits(row).get(way, (None, 0.0))
    return "" if prompt is None else f"{prompt:.1f} + {tokens:.1f}"


def whole(row: dict[str, Any], way: str) -> str:
    """Return the seconds of a way's whole answer; blank if it did not run."""
    return f"{sum(waits(row)[way]):.0f}" if way in waits(row) else ""


def lost(run: dict[str, Any], way: str) -> str:
    """Return the mean KL of sparse prompts, and that of the worst text."""
    return f"{run[way]['kl']:.4f} ({max(text[way]['kl'] for text in run['texts']):.4f})"


# Checks.


def other_families(outcomes: dict[str, list[str]]) -> list[list[str]]:
    """Return families that are not equal to dense: their names, the outcome and the reason, shared where it is one."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, (verdict, remark) in sorted(outcomes.items()):
        if verdict != "equal":
            shared = re.sub(rf"^{re.escape(name)}\b", "the model", remark.replace("`", ""))
            shared = re.sub(r"\b[A-Z]\w+(Attention|Projection)\b", "its own module", shared)
            shared = re.sub(r"\b[A-Z]\w+(ForCausalLM|LMHeadModel|WithLMHead)\b", "the model", shared)
            reasons.setdefault((verdict, shared.replace("|", "\\|")), []).append(name)
    return [[", ".join(names), verdict, remark] for (verdict, remark), names in sorted(reasons.items())]
