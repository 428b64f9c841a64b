"""Tables of quality: the headline, both models, the paper's values beside ours, rivals, ablations."""

import pathlib
import tomllib
from collections.abc import Iterable
from typing import Any, NamedTuple

from evals.methods import REMAINDER
from evals.metrics import Estimate
from evals.results import Result
from evals.rivals import RIVALS
from evals.tables import HEADS, Grid, percent, protocol, signed_percent, to_markdown
from hashtrain.settings.train_command import PAPER
from sparse_decode.costs import state_bytes

from readme_tables.speed import faster
from readme_tables.stored import load, spread, stored

OURS, WINDOW = "transform+remainder", "recent"
SECOND_MODEL = "SmolLM2-135M-Instruct"
TEXTS = {"English": "smollm2/english", "Python": "smollm2/python"}
"""Stored runs on the second model, after a dense prompt, by kind of text."""
SHORT = (OURS, "oracle", "transform", "paper", "lsh")
"""Methods of the table of README.md; docs/results.md has all."""
HEAD_DIM = 64  # of both models
ITEMS = pathlib.Path(__file__).resolve().parents[2] / "packages" / "evals" / "paper" / "items.toml"


def headline(results: pathlib.Path) -> str:
    """Return three points: quality at the first budget of the stored runs, speed, and speed of larger shapes."""
    demo, second, python = (load(results, name) for name in ("demo/decode", *TEXTS.values()))
    budget, runs = demo.config["budgets"][0], (second, python, demo)
    lost, blind = [_within(run, OURS) for run in runs], [change(run, WINDOW) for run in runs]
    if (texts := _texts(second)) != _texts(python):
        raise ValueError(f"the sentence needs as many texts of each kind, got {texts} and {_texts(python)}")
    return (
        f"- **How much worse:** after a dense prompt, perplexity [95 % interval] changes by {lost[0]} on English (a "
        f"sliding window: {blind[0]}) and {lost[1]} on Python ({blind[1]}): {SECOND_MODEL}, weights "
        f"rounded to 4 bits, {texts}. Demo model: {lost[2]} ({blind[2]}), {_texts(demo)}. A step reads the keys "
        f"and values of {100 * budget:g} % of the tokens; with all codes, {100 * step_share(second, OURS):.0f} % of "
        f"the bytes. No larger model was measured.\n{faster(results)}"
    )


def step_share(run: Result, method: str) -> float:
    """Return the bytes that a layer's step requests, as a share of all keys and values in 16 bits.

    A step at the middle of the scored rows reads all codes, the keys and values of the tokens selected, and the sums of
    the remainder. Of the oracle's search nothing is counted. Rivals read by their measured density.
    """
    config, row = run.config, run.one(**_first(run, method), metric="kl")
    tokens = config["context"] - (config.get("scored") or config["context"] // 2) // 2
    name, pair = method.removesuffix(REMAINDER), 2 * 2 * HEAD_DIM
    rival = RIVALS.get(name)
    bits = (row.bits or 0) if rival is None else rival.kept_bits(rival.published[0], HEAD_DIM)
    selected = row.budget if rival is None else row.density
    sums = state_bytes(HEAD_DIM) if method != name else 0
    return (tokens * bits / 8 + (selected or 0.0) * tokens * pair + sums) / (tokens * pair)


def short_table(results: pathlib.Path) -> str:
    """Return perplexity and KL of the second model after a dense prompt, for `SHORT`."""
    runs = {kind: load(results, name) for kind, name in TEXTS.items()}
    first = next(iter(runs.values()))
    title = (
        f"{SECOND_MODEL}, {100 * first.config['budgets'][0]:g} % of the tokens, "
        f"the first and the last {first.config['recent']} among them: change from dense"
    )
    steps = stored(results, "smollm2/training")["steps"]
    note = f"`paper`: the paper's MLP, trained for {steps} steps (the paper: {PAPER['steps']:,})."
    header = ["method", *(name for kind in runs for name in (f"perplexity, {kind}", "KL, nats"))]
    return to_markdown(Grid(title, header, [[[name, *scores(runs.values(), name)] for name in SHORT]], note))


def demo(results: pathlib.Path) -> str:
    """Return the table of each method's quality on the demo model, best first."""
    runs = [load(results, f"demo/{phase}") for phase in ("everywhere", "decode")]
    trained = stored(results, "demo/training")
    config = runs[0].config
    lines = [[name, *_found(trained, name, ("iou", "mass")), *scores(runs, name)] for name in _by_kl(runs[0])]
    counts = [run.config["documents"] for run in runs]
    title = (
        f"{percent(config['budgets'][0])} of the visible tokens, {protocol(config)}, {trained['bits']}-bit codes, demo "
        f"model, held-out contexts of {config['context']:,} tokens: {trained['held_out']} for IoU and mass; perplexity "
        f"and KL with every row sparse ({counts[0]} contexts) and behind a dense prompt of half the context "
        f"({counts[1]} contexts)"
    )
    titles = ["perplexity", "KL from dense, nats", "perplexity, prompt dense", "KL, prompt dense"]
    return to_markdown(Grid(title, ["method", "IoU with exact top-k", "attention mass found", *titles], [lines]))


def second(results: pathlib.Path) -> str:
    """Return the table of each method's quality on the second model after a dense prompt, best first."""
    runs = {kind: load(results, name) for kind, name in TEXTS.items()}
    trained, first = stored(results, "smollm2/training"), next(iter(runs.values()))
    lines = []
    for name in _by_kl(first):
        found = trained["hashers"].get(name.removesuffix(REMAINDER))
        low = f"{min(layer['low'] for layer in found['kv_head']['layers']):.2f}" if found else ""
        lines.append([name, *_found(trained, name, ("iou", "mass")), low, *scores(runs.values(), name)])
    config = first.config
    counts = ", ".join(f"{run.config['documents']} of {kind}" for kind, run in runs.items())
    title = (
        f"{percent(config['budgets'][0])} of the visible tokens, {protocol(config)}, {trained['bits']}-bit codes, "
        f"{SECOND_MODEL}: the last {config['scored']:,} of {config['context']:,} tokens behind a dense prompt, "
        f"held-out texts: {counts}; IoU and mass per KV head, on {trained['held_out']} contexts"
    )
    titles = [name for kind in runs for name in (f"perplexity, {kind}", f"KL, {kind}")]
    header = ["method", "IoU", "mass", "mass, 5th percentile in the worst head", *titles]
    return to_markdown(Grid(title, header, [lines]))


def ablations(results: pathlib.Path) -> str:
    """Return the means of every hasher of a training, one line each, the best IoU first."""
    trained = stored(results, "demo/ablations")
    found = trained["hashers"]

    def line(name: str) -> list[str]:
        pairs = [found[name][heads]["mean"] for heads in HEADS]
        rate = trained["learning_rates"].get(name)
        return [name, *(f"{p['iou']:.3f} / {p['mass']:.3f}" for p in pairs), "" if rate is None else f"{rate:g}"]

    names = sorted(found, key=lambda name: -found[name]["kv_head"]["mean"]["iou"])
    title = (
        f"IoU / attention mass, mean over the layers that run sparse, top {percent(trained['fraction'])}, "
        f"{trained['bits']} bits unless named, {trained['held_out']} held-out contexts of {trained['context']} tokens, "
        f"{trained['steps']} steps a layer"
    )
    return to_markdown(Grid(title, ["hasher", *HEADS.values(), "learning rate"], [[line(name) for name in names]]))


def rivals(results: pathlib.Path) -> str:
    """Return the table of differences to the rivals, one line per comparison."""
    found: dict[str, dict[str, Estimate]] = {}
    for entry in stored(results, "demo/differences")["table 2"]:
        (ours, own), (rival, theirs) = entry["a"], entry["b"]
        label = f"{ours} at {percent(own)}, {rival} at {percent(theirs)}"
        found.setdefault(label, {})[entry["metric"]] = Estimate(entry["mean"], entry["low"], entry["high"])
    run = load(results, "demo/magicpig")
    for row in run.rows:
        if row.method not in (OURS, "transform", "planes") or not (row.against or "").startswith("magicpig"):
            continue
        matched = row.rule == f"as {row.against}"
        if matched or (row.rule == "visible" and row.against == "magicpig-bare"):
            at = f"as many tokens as {row.against} took" if matched else f"{percent(row.budget or 0)}, {row.against}"
            found.setdefault(f"{row.method} at {at}", {})[row.metric] = Estimate(row.value, row.low, row.high)
    title = (
        f"Mean difference over {run.config['documents']} held-out contexts of {run.config['context']:,} tokens, model "
        f"`{run.config['model']}`, every row sparse, {protocol(run.config)} [95 % paired bootstrap interval]; below "
        "zero is better for ours"
    )
    lines = [[label, *(spread(values[name], "+.3f") for name in ("kl", "nll"))] for label, values in found.items()]
    return to_markdown(Grid(title, ["ours less the rival's", "KL from dense, nats", "loss, nats a token"], [lines]))


class Beside(NamedTuple):
    """A line of one of the paper's tables, and the stored run and method that measure the same."""

    table: str
    line: str
    run: str
    method: str
    budget: float


BESIDE = (
    Beside("table 1", "LSH before", "order_ppl", "lsh", 0.02),
    Beside("table 1", "LSH after", "order_ppl", "linear-exact", 0.02),
    Beside("table 1", "MLP before", "order_ppl", "paper-exact-untrained", 0.02),
    Beside("table 1", "MLP after", "order_ppl", "paper-exact", 0.02),
    Beside("table 2", "oracle, 2 %", "exact_quest", "oracle", 0.02),
    Beside("table 2", "Quest, 3.1 %", "exact_quest", "quest", 0.031),
    Beside("table 2", "Spotlight, 5 %", "exact_quest", "paper-exact", 0.05),
    Beside("table 2", "Spotlight, 2 %", "exact_quest", "paper-exact", 0.02),
    Beside("table 3", "Spotlight, sink and local", "exact_ends", "paper-exact", 0.02),
    Beside("table 3", "sink and local alone", "exact_no_retrieval", "recent", 0.0001),
    Beside("table 10", "reconstruction", "order_ppl", "paper-exact-mse", 0.02),
    Beside("table 10", "ranking", "order_ppl", "paper-exact", 0.02),
    Beside("table 11", "down-projection, 16 x", "exact_down_proj", "down-proj-exact", 0.02),
    Beside("table 11", "hashing", "exact_down_proj", "paper-exact", 0.02),
)
DENSE_OF = {"table 10": "table 2", "table 11": "table 2"}
"""Tables of the paper that do not repeat the perplexity of dense attention, and the one that has it."""
SHORTER = 5
"""How many times as long an LSH code must be, in the paper, to find as much as its learned one."""


def beside_paper(results: pathlib.Path) -> str:
    """Return the table of costs here and in the paper, and a sentence on its code length."""
    printed, lines = _printed(), []
    for of in BESIDE:
        run = load(results, f"paper/{of.run}")
        ours = run.one(method=of.method, budget=of.budget, against=None, metric="perplexity_ratio").value
        theirs = printed[of.table][of.line] / printed[DENSE_OF.get(of.table, of.table)]["dense"]
        shown = str(run.config["model"]), signed_percent(ours), signed_percent(theirs)
        lines.append([f"{of.table}: {of.line}", *shown])
    title = (
        "Perplexity over dense attention's, in the paper's protocol: here (demo model: 8 contexts of 4,096 tokens; "
        "smollm2: 6 of 2,048, three layers sparse) and in the paper (LLaMA3-8B, PG19)"
    )
    lengths = load(results, "paper_demo/codelength").select(method="paper", metric="times_shorter")
    times = {row.heads: f"{row.value:.1f}" for row in lengths}
    note = (
        f"128 bits of `paper` find as much as untrained LSH of {times['kv_head']} times as many bits with one "
        f"selection per KV head, {times['query_head']} times with one per query head; the paper says {SHORTER} times."
    )
    header = ["the paper's table and line", "model here", "here", "the paper"]
    return to_markdown(Grid(title, header, [lines], note))


def _printed() -> dict[str, dict[str, float]]:
    """Return the paper's perplexity on its first text, by table and line; of table 1 that of LLaMA3-8B, by column."""
    items = tomllib.loads(ITEMS.read_text("utf-8"))["items"]
    _, header, *models = next(item["paper"] for item in items if item["name"] == "table 1")
    (cells,) = (line.split("|")[1:] for line in models if line.startswith("LLaMA3-8B"))
    found = zip(header.split("|")[1:], (float(cell.partition(" / ")[2]) for cell in cells), strict=True)
    tables = {"table 1": {name.replace("original", "dense"): value for name, value in found}}
    for item in items:
        for line in item.get("paper", [])[2:]:
            name, number, *_ = line.split("|")
            if number.replace(".", "", 1).isdigit():
                tables.setdefault(item["name"], {})[name] = float(number)
    return tables


def scores(runs: Iterable[Result], method: str) -> list[str]:
    """Return a method's change of perplexity and its KL in each run."""
    return [text for run in runs for text in (change(run, method), f"{_value(run, method, 'kl'):.4f}")]


def change(run: Result, method: str) -> str:
    """Return a method's change of perplexity at a run's first rule and budget."""
    return signed_percent(_value(run, method, "perplexity_ratio"))


def _first(run: Result, method: str) -> dict[str, Any]:
    """Return the columns of a method's rows at a run's first rule and budget."""
    return {"method": method, "rule": run.config["rules"][0], "budget": run.config["budgets"][0], "against": None}


def _value(run: Result, method: str, metric: str) -> float:
    return run.one(**_first(run, method), metric=metric).value


def _by_kl(run: Result) -> list[str]:
    return sorted(run.config["methods"], key=lambda name: _value(run, name, "kl"))


def _found(trained: dict[str, Any], method: str, metrics: Iterable[str]) -> list[str]:
    """Return a hasher's means of the training, or blanks for what is no hasher."""
    found = trained["hashers"].get(method.removesuffix(REMAINDER))
    return [f"{found['kv_head']['mean'][metric]:.3f}" if found else "" for metric in metrics]


def _texts(run: Result) -> str:
    scored = run.config["scored"]
    part = "second half" if scored is None else f"last {scored:,} tokens"
    return f"the {part} of {run.config['documents']} texts of {run.config['context']:,}"


def _within(run: Result, method: str) -> str:
    """Return a method's change of perplexity with its 95 % interval."""
    row = run.one(**_first(run, method), metric="perplexity_ratio")
    if row.low is None or row.high is None:
        raise ValueError(f"expected an interval of the perplexity of {method}, got none")
    return f"{change(run, method)} [{100 * (row.low - 1):+.1f}, {100 * (row.high - 1):+.1f}]"
