"""Tables of what methods find and what they cost the model."""

import pathlib
from collections.abc import Callable

from evals import report
from evals.grid import Grid, to_markdown
from evals.result import Result

from readme_tables.stored import load, stored


def of_run(name: str, grid: Callable[[Result], Grid]) -> Callable[[pathlib.Path], str]:
    return lambda results: to_markdown(grid(load(results / f"{name}.json")))


def iou(heads: str) -> Callable[[Result], Grid]:
    return lambda result: report.iou_grid(result, result.config["budgets"][0], heads)


def training(results: pathlib.Path, heads: str, name: str = "training") -> str:
    return to_markdown(report.training_grid(stored(results / f"{name}.json"), heads))


def with_matches(name: str) -> Callable[[pathlib.Path], str]:
    """Return what makes the table of perplexity and those at the density of each rival that was matched."""

    def tables(results: pathlib.Path) -> str:
        result = load(results / f"{name}.json")
        found = [report.ppl_grid(result), *(report.matched_grid(result, rival) for rival in result.config["match"])]
        return "\n\n".join(map(to_markdown, found))

    return tables


def glance(results: pathlib.Path) -> str:
    """The quality of each method at the first budget of the stored runs, best first."""
    ppl, training = load(results / "ppl.json"), stored(results / "training.json")["hashers"]
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
        f"{stored(results / 'training.json')['held_out']} for IoU and mass, {count} for perplexity, which is "
        f"{value('dense', 'perplexity'):.2f} dense"
    )
    header = ["method", "IoU with exact top-k", "attention mass found", "perplexity", "KL from dense, nats"]
    return to_markdown(Grid(title, header, [lines]))
