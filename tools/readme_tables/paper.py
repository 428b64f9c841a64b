"""Tables of quality in the paper's protocol, for `paper-exact` and others, next to the paper's values."""

import itertools
import pathlib
from typing import Literal, NamedTuple, cast

from evals import paper
from evals.grid import Grid, percent, to_markdown
from evals.metrics import bootstrap
from evals.report import grids, signed_percent
from evals.result import Result, Row

from readme_tables.headline import SECOND_MODEL
from readme_tables.stored import load, named, spread, stored

ORDER = ("paper-exact-untrained", "lsh", "linear-exact", "paper-exact")
"""The order in the paper's table 1, worst first."""
_COLUMN = {"dense": 1, "oracle": 2, "lsh": 3, "linear-exact": 4, "paper-exact-untrained": 5, "paper-exact": 6}
"""Column of each method in the paper's table 1."""
_HEADS = "query_head"
_FOUND = ("iou", "mass")


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
        cost = ["", "0"]
        if method != "dense":
            ratio, kl = _costs(ppl, method)
            cost = [f"{ratio.value:.4f}", f"{kl.value:.5f}"]
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
        ratio, kl = _costs(found, method)
        lines.append([label, signed_percent(ratio.value), f"{kl.value:.4f}", percent(ratio.density or 0)])
    config = load(results / "exact_down_proj.json").config
    title = (
        f"{config['documents']} held-out contexts of {config['context']:,} tokens, model `{config['model']}`, all "
        f"tokens scored, the first {config['dense_layers']} layers dense, 2 % of the full length"
    )
    return to_markdown(Grid(title, ["method", "perplexity", "KL, nats", "density"], [lines]))


SECOND_PROTOCOL = {
    "oracle": ("order", "oracle"),
    "linear-exact": ("order", "linear-exact"),
    "paper-exact": ("order", "paper-exact"),
    "paper-exact, trained on Python code": ("corpora_other", "paper-exact"),
    "lsh": ("order", "lsh"),
    "paper-exact-untrained": ("order", "paper-exact-untrained"),
    "down-proj-exact: 4 numbers in place of 128 bits": ("down_proj", "down-proj-exact"),
    "paper-exact, and 4 first and 64 last tokens": ("ends", "paper-exact"),
    "4 first and 64 last tokens alone": ("no_retrieval", "recent"),
}
"""Rows of the table of the paper's tables 1, 3, 6 and 11 on the second model: the stored run and its method."""


def second(results: pathlib.Path) -> str:
    """Return overlap, perplexity and KL in the paper's protocol with all but two layers of the second model sparse."""
    iou = load(results / f"{WHOLE.iou}.json")
    runs = {name: load(results / f"second_exact_{name}.json") for name, _ in SECOND_PROTOCOL.values()}
    lines = []
    for label, (name, method) in SECOND_PROTOCOL.items():
        ratio, kl = _costs(runs[name], method)
        found = f"{overlap(iou, method):.3f}" if label in ORDER else ""
        lines.append([label, found, _percent(ratio), spread(kl, ".4f")])
    config = runs["order"].config
    title = (
        f"All layers of {SECOND_MODEL} but the first {config['dense_layers']} sparse, 2 % of the full length, one "
        f"selection per query head: {config['documents']} held-out contexts of {config['context']:,} tokens, all scored"
    )
    return to_markdown(Grid(title, ["selection", "IoU", "perplexity, %", "KL, nats"], [lines]))


def _percent(ratio: Row) -> str:
    """Return a ratio of perplexities and its interval, in percent above 1."""
    values = (ratio.value, ratio.low, ratio.high)
    return "{} [{}, {}]".format(*(f"{100 * (x - 1):+.1f}" for x in values if x is not None))


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


def _costs(result: Result, method: str) -> tuple[Row, Row]:
    """Return the rows of a method's perplexity over dense's, and of its KL, at a run's one rule and least budget."""
    at = {"method": method, "against": None, "budget": min(result.config["budgets"])}
    return result.one(metric="perplexity_ratio", **at), result.one(metric="kl", **at)


Better = Literal["holds", "does not hold", "undecided"]
LINKS = (*itertools.pairwise(ORDER), ("lsh", "paper-exact"))
"""Pairs of which the second is better in the paper: neighbours in its order, and its hash against LSH."""


class Link(NamedTuple):
    """Whether the second of two methods is better by one metric."""

    metric: str
    worse: str
    better: str
    found: Better
    shown: str
    """Both values with their intervals, or that of the paired difference."""


class Runs(NamedTuple):
    """Names of two stored runs with the same layers sparse: overlap, and cost."""

    iou: str
    ppl: str


SOME = Runs("order_iou", "order_ppl")
WHOLE = Runs("second_exact_iou", "second_exact_order")


def links(results: pathlib.Path, runs: Runs = SOME) -> list[Link]:
    """Compare each pair of `LINKS` by IoU, perplexity and KL, with 95 % intervals over contexts.

    Where a run has stored the paired difference, it decides; otherwise the two methods' own intervals do, which say
    more often that a link is undecided.
    """
    iou, ppl = (load(results / f"{name}.json") for name in runs)
    found: list[Link] = []
    for worse, better in LINKS:
        at = {"metric": "iou", "heads": _HEADS, "layer": None, "head": None}
        low, high = (iou.one(method=name, **at) for name in (worse, better))
        found.append(
            Link("IoU", worse, better, _apart(low, high), f"{spread(high, '.3f')} against {spread(low, '.3f')}")
        )
        for name, metric, paired in (("perplexity", "perplexity_ratio", "nll"), ("KL", "kl", "kl")):
            high, low = (ppl.one(method=method, metric=metric, against=None) for method in (worse, better))
            own = _apart(low, high), f"{spread(low, '.4f')} against {spread(high, '.4f')}"
            found.append(Link(name, worse, better, *(_paired(ppl, worse, better, paired) or own)))
    return found


def _apart(low: Row, high: Row) -> Better:
    """Whether the second of two rows is above the first, by their intervals."""
    (a, b), (c, d) = ((cast(float, row.low), cast(float, row.high)) for row in (low, high))
    return "holds" if b < c else "does not hold" if d < a else "undecided"


def _paired(ppl: Result, worse: str, better: str, metric: str) -> tuple[Better, str] | None:
    """Decide by a stored paired difference of losses, in whichever direction it is stored; None if there is none."""
    for sign, (method, against) in ((1, (better, worse)), (-1, (worse, better))):
        for row in ppl.select(method=method, against=against, metric=metric):
            value, *edges = (sign * cast(float, x) for x in (row.value, row.low, row.high))
            low, high = sorted(edges)
            decided: Better = "holds" if high < 0 else "does not hold" if low > 0 else "undecided"
            return decided, f"paired difference {value:+.4f} nats [{low:+.4f}, {high:+.4f}]"
    return None


SAID = {"holds": "holds", "does not hold": "does **not** hold", "undecided": "is **undecided**"}


def sentences(results: pathlib.Path, runs: Runs = SOME) -> str:
    """Return one sentence per link of the paper's order: whether it holds here."""
    return "\n".join(
        f"- {link.metric}: that `{link.better}` is better than `{link.worse}` {SAID[link.found]}: {link.shown}."
        for link in links(results, runs)
    )


def plain(name: str, model: str, results: pathlib.Path) -> str:
    """Return the first table of a stored run of a model."""
    result = load(results / f"{name}.json")
    return to_markdown(grids(named(result, model))[0])  # the means; further tables are by layer


SECOND = ("cones", "output_error", "fidelity", "exercises", "needle")
"""Stored runs on the second model that pages show as they are."""
DEMO = ("demo_fidelity", "demo_exercises", "needle_demo", "exact_needle")
"""Stored runs on the demo model that the page of the paper's tables shows as they are."""
DEMO_PERPLEXITY = (
    *("corpora", "corpora_other", "exact_corpora", "exact_corpora_other"),
    *("losses", "exact_losses", "down_proj"),
)
"""Stored runs of `evals ppl` on the demo model, on that page."""
SECOND_PERPLEXITY = ("exact_magicpig", "exact_magicpig_ends")
"""Stored runs of `evals ppl` on the second model, on that page."""


def _layers(result: Result) -> list[int]:
    every = sorted({row.layer for row in result.rows if row.layer is not None})
    return [n for n in every if n >= result.config["dense_layers"] and n not in result.config["dense_at"]]


def why(results: pathlib.Path) -> str:
    """Return why the paper's codes fell behind: each suspect alone, by method, with intervals over the texts."""
    found = stored(results / "why_paper.json")
    names = [name for name in WHY if any(line["method"] == name for line in found["lines"])]
    lines = []
    for suspect in dict.fromkeys(line["suspect"] for line in found["lines"]):
        own = [line for line in found["lines"] if line["suspect"] == suspect]
        excess = {name: [line["excess"] for line in own if line["method"] == name] for name in names}
        shown = [_mean_of(values, ".3f") for values in excess.values()]
        differences = [a - b for a, b in zip(excess["paper"], excess["lsh"], strict=True)]
        lines.append([suspect, *shown, _mean_of(differences, "+.3f")])
    spread = "the two texts" if found["documents"] == 2 else "95 % bootstrap interval over the texts"
    title = (
        f"{SECOND_MODEL}, nats of negative log-likelihood over dense attention, second half of {found['documents']} "
        f"texts of {found['context']} tokens, the first {found['dense_layers']} layers dense, 2 %: mean [{spread}]"
    )
    header = ["every row sparse, and", *(WHY[name] for name in names), "paper - lsh, paired"]
    return to_markdown(Grid(title, header, [lines]))


WHY = {"lsh": "lsh", "paper": "paper", "paper-rotation": "paper, best fair form"}
"""Methods of `why_paper.json` and what the table calls them."""


SUSPECTS = {
    "base": "as `hashtrain` trains it",
    "rows": "every row trained, from the first on",
    "steps": "three times as many steps",
    "estimator": "straight-through estimator",
    "target": "target of the full length",
    "ends": "first and last tokens among the targets",
    "best": "straight-through estimator and three times as many steps",
    "lsh": "untrained LSH in place of `paper`",
}
"""Names of the stored runs `suspect_NAME` and the setting in which each differs from the first."""


def suspects(results: pathlib.Path) -> str:
    """Return what `paper` finds in single layers of the second model if one setting of its training is another."""
    runs = {name: load(results / f"suspect_{name}.json") for name in SUSPECTS}
    lines = []
    for name, run in runs.items():
        at = {"method": "lsh" if name == "lsh" else "paper", "heads": "kv_head", "layer": None, "head": None}
        rows = [run.one(metric=metric, **at) for metric in _FOUND]
        lines.append([SUSPECTS[name], *(spread(row, ".3f") for row in rows)])
    found = runs["base"]
    layers = _layers(found)
    title = (
        f"`paper` in layers {', '.join(map(str, layers))} of {SECOND_MODEL}, 400 steps, each setting alone: "
        f"{found.config['documents']} held-out contexts of {found.config['context']:,} tokens"
    )
    return to_markdown(Grid(title, ["training", "IoU", "mass"], [lines]))


def best_form(results: pathlib.Path) -> str:
    """Return what `paper` in its best form costs in some layers of the second model, beside other hashers."""
    runs = {name: load(results / f"best_form_{name}.json") for name in ("others", "base", "best")}
    cells = (
        ("exact top 2 %", "others", "oracle"),
        ("`transform`", "others", "transform"),
        (f"`paper`, {SUSPECTS['best']}", "best", "paper"),
        (f"`paper`, {SUSPECTS['base']}", "base", "paper"),
        ("untrained LSH", "others", "lsh"),
    )
    lines = []
    for said, run, method in cells:
        excess, kl = _costs(runs[run], method)
        lines.append([said, _percent(excess), spread(kl, ".4f")])
    found = runs["base"]
    dense = found.config["dense_at"]
    sparse = ", ".join(str(layer) for layer in range(max(dense)) if layer not in dense)
    title = (
        f"Every row sparse in layers {sparse} of {SECOND_MODEL}, 2 %, first and last "
        f"tokens read: {found.config['documents']} held-out contexts of {found.config['context']:,} tokens"
    )
    return to_markdown(Grid(title, ["selection", "perplexity, %", "KL, nats"], [lines]))


def _mean_of(values: list[float], how: str) -> str:
    return spread(bootstrap([[value] for value in values], 0)[0], how)
