"""Tables of the methods' selection quality and their effect on the model."""

import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from evals import report
from evals.frontier import Point, points, require_comparable
from evals.frontier import grid as frontier_grid
from evals.grid import Grid, percent, to_markdown
from evals.methods import OURS as RANKED
from evals.metrics import Estimate
from evals.report import signed_percent
from evals.result import Result
from evals.tasks.ppl import AS

from readme_tables.stored import load, spread, stored
from readme_tables.training import training_grid


def of_run(name: str, grid: Callable[[Result], Grid]) -> Callable[[pathlib.Path], str]:
    return lambda results: to_markdown(grid(load(results / f"{name}.json")))


def iou(heads: str) -> Callable[[Result], Grid]:
    return lambda result: report.iou_grid(result, result.config["budgets"][0], heads)


def training(name: str, heads: str, results: pathlib.Path) -> str:
    return to_markdown(training_grid(stored(results / f"{name}.json"), heads))


def with_matches(name: str, results: pathlib.Path) -> str:
    """Return the table of perplexity, followed by one at the density of each matched rival."""
    result = load(results / f"{name}.json")
    found = [report.ppl_grid(result), *(report.matched_grid(result, rival) for rival in result.config["match"])]
    return "\n\n".join(map(to_markdown, found))


def scores(runs: Iterable[Result], method: str) -> list[str]:
    """Return a method's change of perplexity and its KL in each run."""
    return [text for run in runs for text in (change(run, method), f"{cell(run, method, 'kl'):.4f}")]


class Measured(NamedTuple):
    """The stored runs of one model: every row sparse, sparse after a dense prompt, and the training."""

    everywhere: str
    decode: str
    training: str


def glance(names: Measured, subject: str, results: pathlib.Path) -> str:
    """Return the table of each method's quality at the first budget, best first."""
    runs = [load(results / f"{name}.json") for name in (names.everywhere, names.decode)]
    trained = stored(results / f"{names.training}.json")
    budget, context = runs[0].config["budgets"][0], runs[0].config["context"]
    lines = []
    for name in sorted(runs[0].config["methods"], key=lambda name: cell(runs[0], name, "kl")):
        found = trained["hashers"].get(name.removesuffix("+remainder"))
        line = [name, *(f"{found['kv_head']['mean'][k]:.3f}" if found else "" for k in ("iou", "mass"))]
        lines.append([*line, *scores(runs, name)])
    scored = runs[1].config["scored"]
    prompt = "half the context" if scored is None else f"{context - scored - 1:,} tokens"
    title = (
        f"{100 * budget:g} % of the visible tokens, {report.protocol(runs[0].config)}, "
        f"{trained['bits']}-bit codes, {subject}, held-out contexts of "
        f"{context:,} tokens: {trained['held_out']} for IoU and mass; perplexity and KL with every row sparse "
        f"({runs[0].config['documents']} contexts) and behind a dense prompt of {prompt} "
        f"({runs[1].config['documents']} contexts)"
    )
    titles = ["perplexity", "KL from dense, nats", "perplexity, prompt dense", "KL, prompt dense"]
    return to_markdown(Grid(title, ["method", "IoU with exact top-k", "attention mass found", *titles], [lines]))


def texts(names: dict[str, str], trained_name: str, subject: str, results: pathlib.Path) -> str:
    """Return the table of each method's quality after a dense prompt, on texts of several kinds.

    Args:
        names: the stored run for each kind of text; trained_name: the stored training.
    """
    runs = {kind: load(results / f"{name}.json") for kind, name in names.items()}
    trained = stored(results / f"{trained_name}.json")
    first = next(iter(runs.values()))
    lines = []
    for name in sorted(first.config["methods"], key=lambda name: cell(first, name, "kl")):
        found = trained["hashers"].get(name.removesuffix("+remainder"))
        heads = found["kv_head"] if found else None
        low = f"{min(layer['low'] for layer in heads['layers']):.2f}" if heads else ""
        line = [name, *(f"{heads['mean'][k]:.3f}" if heads else "" for k in ("iou", "mass")), low]
        lines.append([*line, *scores(runs.values(), name)])
    counts = ", ".join(f"{run.config['documents']} of {kind}" for kind, run in runs.items())
    config, budget = first.config, 100 * first.config["budgets"][0]
    where = f"the last {config['scored']:,} of {config['context']:,} tokens behind a dense prompt"
    title = (
        f"{budget:g} % of the visible tokens, {report.protocol(config)}, "
        f"{trained['bits']}-bit codes, {subject}: {where}, held-out texts: {counts}; "
        f"IoU and mass per KV head, on {trained['held_out']} contexts"
    )
    titles = [name for kind in runs for name in (f"perplexity, {kind}", f"KL, {kind}")]
    header = ["method", "IoU", "mass", "mass, 5th percentile in the worst head", *titles]
    return to_markdown(Grid(title, header, [lines]))


def always_read(names: dict[str, str], bare: dict[str, str], subject: str, results: pathlib.Path) -> str:
    """Return the table of each method with and without the tokens that every row reads.

    Args: names, bare: the stored run for each kind of text, with these tokens and without.
    """
    pairs = {kind: [load(results / f"{of[kind]}.json") for of in (names, bare)] for kind in names}
    first, other = next(iter(pairs.values()))
    lines = []
    for name in sorted(other.config["methods"], key=lambda name: cell(other, name, "kl")):
        lines.append([name, *scores((run for pair in pairs.values() for run in pair), name)])
    title = (
        f"Perplexity and KL of {subject} behind a dense prompt, 2 % of the visible tokens: "
        f"{report.protocol(first.config)} ({first.config['documents']} texts of each kind), or "
        f"{report.protocol(other.config)} ({other.config['documents']} of them)"
    )
    how = ("always read", "none read")
    header = ["method", *(f"{kind}, {one}{x}" for kind in pairs for one in how for x in ("", ", KL"))]
    return to_markdown(Grid(title, header, [lines]))


def bytes_read(names: dict[str, tuple[str, ...]], rows: str, results: pathlib.Path) -> str:
    """Return the table of quality against bytes, given stored runs by subject; rows: what they score."""
    sections = []
    for subject, runs in names.items():
        found = [load(results / f"{name}.json") for name in runs]
        own = [point for point in points(found, HEAD_DIM) if point.method == OURS]
        sections.append([[subject, *_bytes_line(point)] for point in reversed(own)])
    title = (
        f"`{OURS}` {rows}, 16-bit keys and values: bytes that a layer's step requests, as a share "
        "of all keys and values, at the middle of the scored rows (`sparse_decode.costs.traffic.step_bytes`)"
    )
    header = ["model, text", "tokens read", "search and values", "bytes", "perplexity", "KL, nats"]
    return to_markdown(Grid(title, header, sections))


def frontier(names: tuple[str, ...], results: pathlib.Path) -> str:
    """Return the table of all methods by bytes, from stored runs of one model and text."""
    found = [load(results / f"{name}.json") for name in names]
    require_comparable(found)
    return to_markdown(frontier_grid(points(found, HEAD_DIM)))


OURS = "transform+remainder"
ALL_READ = "all codes, all values"
HEAD_DIM = 64  # of both models


def _bytes_line(point: Point) -> list[str]:
    read = f"{100 * point.budget:g} %", point.settings or ALL_READ, f"{100 * point.share:.1f} %"
    return [*read, signed_percent(point.perplexity.value), f"{point.kl.value:.4f}"]


def cell(ppl: Result, method: str, metric: str, budget: float | None = None) -> float:
    """Return a method's value at a run's first rule, and at its first budget unless one is given."""
    wanted = {"rule": ppl.config["rules"][0], "budget": budget or ppl.config["budgets"][0], "against": None}
    return ppl.one(method=method, metric=metric, **wanted).value


def change(ppl: Result, method: str, budget: float | None = None) -> str:
    """Return a method's change of perplexity at a run's first rule, and at its first budget unless one is given."""
    return signed_percent(cell(ppl, method, "perplexity_ratio", budget))


def _differences(results: pathlib.Path) -> Iterator[tuple[str, dict[str, Estimate]]]:
    """Yield each comparison's label, and the mean difference of each metric with its interval."""
    found: dict[str, dict[str, Estimate]] = {}
    for entry in stored(results / "differences.json")["table 2"]:
        (ours, own), (rival, theirs) = entry["a"], entry["b"]
        label = f"{ours} at {percent(own)}, {rival} at {percent(theirs)}"
        found.setdefault(label, {})[entry["metric"]] = Estimate(entry["mean"], entry["low"], entry["high"])
    for row in load(results / "magicpig.json").rows:
        if row.method not in RANKED or row.against is None or not row.against.startswith("magicpig"):
            continue
        matched = row.rule == AS + row.against
        if matched or (row.rule == "visible" and row.against == "magicpig-bare"):
            at = f"as many tokens as {row.against} took" if matched else f"{percent(row.budget or 0)}, {row.against}"
            found.setdefault(f"{row.method} at {at}", {})[row.metric] = Estimate(row.value, row.low, row.high)
    yield from found.items()


def rivals(results: pathlib.Path) -> str:
    """Return the table of differences, one line per comparison."""
    lines = [
        [label, *(spread(values[name], "+.3f") for name in ("kl", "nll"))] for label, values in _differences(results)
    ]
    config = load(results / "magicpig.json").config
    title = (
        f"Mean difference over {config['documents']} held-out contexts of {config['context']:,} tokens, model "
        f"`{config['model']}`, every row sparse, {report.protocol(config)} [95 % paired bootstrap "
        "interval]; below zero is better for ours"
    )
    header = ["ours less the rival's", "KL from dense, nats", "loss, nats a token"]
    return to_markdown(Grid(title, header, [lines]))
