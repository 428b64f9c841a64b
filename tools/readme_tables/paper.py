"""Tables of quality in the paper's protocol, for `paper-exact` and others, next to the paper's values."""

import itertools
import pathlib
from collections.abc import Callable

from evals import paper
from evals.grid import Grid, percent, to_markdown
from evals.report import grids
from evals.result import Result

from readme_tables.headline import SECOND_MODEL
from readme_tables.stored import load, named, stored

ORDER = ("paper-exact-untrained", "lsh", "linear-exact", "paper-exact")
"""The order in the paper's table 1, worst first."""
_COLUMN = {"dense": 1, "oracle": 2, "lsh": 3, "linear-exact": 4, "paper-exact-untrained": 5, "paper-exact": 6}
"""Column of each method in the paper's table 1."""
_HEADS = "query_head"


def papers(method: str) -> str:
    """Return IoU / perplexity of LLaMA3-8B as the paper prints them, or "" if it has none."""
    item = next(item for item in paper.ITEMS if item.name == "table 1")
    assert item.paper is not None
    line = next(line for line in item.paper.sections[0] if line[0] == "LLaMA3-8B")
    return line[_COLUMN[method]] if method in _COLUMN else ""


def order(results: pathlib.Path) -> str:
    """Return the paper's table 1 for the second model: overlap, and perplexity with the same layers sparse."""
    iou, ppl = load(results / "order_iou.json"), load(results / "order_ppl.json")
    lines = []
    for method in ("dense", "oracle", *ORDER, "paper-exact-mse"):
        found = ["", ""] if method in ("dense", "oracle") else [f"{overlap(iou, method, m):.3f}" for m in _FOUND]
        cost = ["", "0"] if method == "dense" else [f"{cost_of(ppl, method, m):{how}}" for m, how in _COSTS]
        lines.append([method, *found, *cost, papers(method)])
    layers = _layers(iou)
    title = (
        f"Layers {', '.join(map(str, layers))} of {SECOND_MODEL} sparse, {iou.config['documents']} held-out contexts "
        f"of {iou.config['context']} tokens, one selection per query head, no token read unasked. IoU and mass: 2 % of "
        f"the visible tokens; perplexity and KL ({ppl.config['documents']} contexts, all tokens scored): 2 % of the "
        "full length, at least 20 tokens"
    )
    header = ["method", "IoU", "mass", "perplexity over dense's", "KL, nats", "the paper: IoU / perplexity, LLaMA3-8B"]
    return to_markdown(Grid(title, header, [lines]))


_FOUND = ("iou", "mass")
_COSTS = (("perplexity_ratio", ".4f"), ("kl", ".5f"))


PROTOCOL = {
    "oracle": ("exact_quest", "oracle"),
    "paper-exact": ("exact_down_proj", "paper-exact"),
    "down-proj-exact: 4 numbers in place of 128 bits": ("exact_down_proj", "down-proj-exact"),
    "paper-exact, and 4 first and 64 last tokens": ("exact_ends", "paper-exact"),
    "4 first and 64 last tokens alone": ("exact_no_retrieval", "recent"),
}
"""Rows of the table of the paper's tables 3 and 11 on the demo model: the stored run and its method."""


def protocol(results: pathlib.Path) -> str:
    """Return perplexity and KL in the paper's protocol on the demo model: with and without sink and local tokens."""
    lines = []
    for label, (name, method) in PROTOCOL.items():
        found = load(results / f"{name}.json")
        at = {"method": method, "against": None, "budget": min(found.config["budgets"])}
        ratio, kl = (found.one(metric=metric, **at) for metric in ("perplexity_ratio", "kl"))
        lines.append([label, f"{100 * (ratio.value - 1):+.1f} %", f"{kl.value:.4f}", percent(ratio.density or 0)])
    config = load(results / "exact_down_proj.json").config
    title = (
        f"{config['documents']} held-out contexts of {config['context']:,} tokens, model `{config['model']}`, all "
        f"tokens scored, the first {config['dense_layers']} layers dense, 2 % of the full length"
    )
    return to_markdown(Grid(title, ["method", "perplexity", "KL, nats", "density"], [lines]))


def longer(results: pathlib.Path) -> str:
    """Return the overlap of one layer's hashers after 800 and after 3,200 training steps."""
    few, many = load(results / "order_iou.json"), load(results / "order_long.json")
    (layer,) = _layers(many)
    at = {"metric": "iou", "heads": _HEADS, "layer": layer, "head": None}
    lines = [[name, *(f"{found.one(method=name, **at).value:.3f}" for found in (few, many))] for name in ORDER]
    title = f"IoU in layer {layer} of {SECOND_MODEL}, as above, {many.config['documents']} contexts for the longer one"
    return to_markdown(Grid(title, ["method", "800 steps", "3,200 steps"], [lines]))


def overlap(result: Result, method: str, metric: str = "iou") -> float:
    """Return a method's mean over the sparse layers and the query heads."""
    return result.one(method=method, metric=metric, heads=_HEADS, layer=None, head=None).value


def cost_of(result: Result, method: str, metric: str) -> float:
    """Return a method's cost; the run has one rule and budget."""
    return result.one(method=method, metric=metric, against=None).value


def links(results: pathlib.Path) -> dict[tuple[str, str, str], bool]:
    """Return for each two neighbours in the paper's order whether the second is better, by IoU, perplexity and KL."""
    iou, ppl = load(results / "order_iou.json"), load(results / "order_ppl.json")
    found = {}
    for worse, better in itertools.pairwise(ORDER):
        found["IoU", worse, better] = overlap(iou, worse) < overlap(iou, better)
        for name, metric in (("perplexity", "perplexity_ratio"), ("KL", "kl")):
            found[name, worse, better] = cost_of(ppl, worse, metric) > cost_of(ppl, better, metric)
    return found


def sentences(results: pathlib.Path) -> str:
    """Return one sentence per pair of neighbours in the paper's order: whether the order holds here."""
    lines = [
        f"- {metric}: `{better}` is {'better' if holds else '**not** better'} than `{worse}`."
        for (metric, worse, better), holds in links(results).items()
    ]
    return "\n".join(lines)


def plain(name: str) -> Callable[[pathlib.Path], str]:
    """Return a function for the first table of a stored run of the second model."""

    def tables(results: pathlib.Path) -> str:
        result = load(results / f"{name}.json")
        return to_markdown(grids(named(result, SECOND_MODEL))[0])  # the means; further tables are by layer

    return tables


def _layers(result: Result) -> list[int]:
    every = sorted({row.layer for row in result.rows if row.layer is not None})
    return [n for n in every if n >= result.config["dense_layers"] and n not in result.config["dense_at"]]


def why(results: pathlib.Path) -> str:
    """Return the results of `tools/why_paper.py`: each suspect alone, untrained LSH and the paper's codes."""
    found = stored(results / "why_paper.json")
    lines = []
    for suspect in dict.fromkeys(line["suspect"] for line in found["lines"]):
        cells = [
            [line["excess"] for line in found["lines"] if (line["suspect"], line["method"]) == (suspect, method)]
            for method in ("lsh", "paper")
        ]
        means = [sum(values) / len(values) for values in cells]
        shown = [
            f"{mean:.3f} ({', '.join(f'{x:.3f}' for x in values)})" for mean, values in zip(means, cells, strict=True)
        ]
        lines.append([suspect, *shown, "paper" if means[1] < means[0] else "lsh"])
    title = (
        f"{SECOND_MODEL}, nats of negative log-likelihood over dense attention, second half of {found['documents']} "
        f"texts of {found['context']} tokens, the first {found['dense_layers']} layers dense, 2 %: mean (each text)"
    )
    return to_markdown(Grid(title, ["every row sparse, and", "lsh", "paper", "better"], [lines]))
