"""Draw the figures of a result."""

from collections.abc import Callable, Sequence
from pathlib import Path

from hashtrain.files.atomic import replace
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from evals.grid import HEADS, heads_of, percent
from evals.methods import REMAINDER
from evals.report import LSH, PHASES, RULES, code_of, ordered
from evals.result import Result, Row

# One colour per method in all figures (Okabe and Ito's palette, safe for colour-blind readers).
COLOURS = {
    "dense": "#4d4d4d",
    "oracle": "#000000",
    "recent": "#999999",
    "lsh": "#56b4e9",
    "paper": "#e69f00",
    "transform": "#cc79a7",
    "planes": "#d55e00",
    "linear": "#b8a000",
    "group-xnor": "#7f3f00",
    "planes-64": "#ff9a5c",
    "quest": "#009e73",
    "quest-heads": "#006a4e",
    "magicpig": "#0072b2",
    "magicpig-sink": "#3f94c6",
    "magicpig-local": "#5fa6cf",
    "magicpig-bare": "#7fb8d8",
    "magicpig-10x150": "#004166",
}
MARKERS = {"oracle": "*", "recent": "x", "lsh": "s", "paper": "^", "planes": "o", "transform": "D"}
MARKERS |= {"linear": "v", "group-xnor": "p", "planes-64": ".", "quest": "P", "quest-heads": "X", "magicpig": "D"}
MARKERS |= {"magicpig-sink": "<", "magicpig-local": "^", "magicpig-bare": "d", "magicpig-10x150": ">"}


def draw(result: Result, path: Path) -> None:
    """Draw a result to a PNG, depending on its task."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    {"ppl": _draw_ppl, "iou": _draw_iou, "codelength": draw_codelength}.get(result.config["task"], _draw_plain)(
        result, figure
    )
    save(figure, path)


def save(figure: Figure, path: Path, dpi: int = 120) -> None:
    """Replace a PNG by a figure, atomically."""
    replace(path, lambda temporary: figure.savefig(temporary, dpi=dpi, format="png"))


def _draw_ppl(result: Result, figure: Figure) -> None:
    """Draw KL from dense over budget, both logarithmic, one panel per rule."""
    rules, budgets = result.config["rules"], sorted(result.config["budgets"])
    for axes, rule in zip(figure.subplots(1, len(rules), sharey=True, squeeze=False)[0], rules, strict=True):
        _log_ticks(axes, budgets, 10, percent)
        axes.set_xlabel(f"budget, {RULES[rule]}")
        for method in _methods(result):
            at = {"method": method, "rule": rule, "metric": "kl", "against": None}
            rows = [result.one(budget=budget, **at) for budget in budgets]
            _line(axes, method, budgets, rows)
            if any(row.value > 0 for row in rows):  # otherwise matplotlib warns that there is nothing to scale
                axes.set_yscale("log", nonpositive="mask")  # at a budget of 100 % the KL is 0
    figure.axes[0].set_ylabel("mean KL from dense, nats")
    figure.suptitle(PHASES[result.config["phase"]])
    _legend(figure)


def _draw_iou(result: Result, figure: Figure) -> None:
    """Draw IoU over layers at the first budget, one panel per kind of head."""
    budget = result.config["budgets"][0]
    kinds = heads_of(result.config)
    for axes, heads in zip(figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True):
        for method in _methods(result):
            rows = result.select(method=method, budget=budget, heads=heads, head=None, metric="iou")
            rows = [row for row in rows if row.layer is not None]
            _line(axes, method, [float(row.layer or 0) for row in rows], rows)
        axes.set(xlabel="layer", ylim=(0, 1.03), title=f"{HEADS[heads]}, top {percent(budget)}")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.axes[0].set_ylabel("IoU with exact attention")
    _legend(figure)


def draw_codelength(result: Result, figure: Figure) -> None:
    """Draw IoU over code bits, one panel per kind of head, one line per hash: untrained LSH, and the learned ones."""
    kinds = heads_of(result.config)
    for axes, heads in zip(figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True):
        rows = result.select(metric="iou", heads=heads)
        codes = {code_of(result, row): row for row in rows}
        for kind in dict.fromkeys((LSH, *result.config["methods"])):
            own = sorted(code for code in codes if code.kind == kind)
            _line(axes, kind, [float(code.bits) for code in own], [codes[code] for code in own])
        _log_ticks(axes, sorted({code.bits for code in codes}), 2, "{:g}".format)
        axes.set(xlabel="bits of a code", title=HEADS[heads])
    figure.axes[0].set_ylabel("IoU with exact attention")
    _legend(figure)


def _draw_plain(result: Result, figure: Figure) -> None:
    """Draw bars for the first budget, one panel per metric and one group of bars per case."""
    rows = [row for row in result.rows if row.against is None and row.layer is None and row.head is None]
    budgets = [row.budget for row in rows if row.budget is not None][:1]
    rows = [row for row in rows if row.budget is None or row.budget in budgets]
    metrics, cases = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("metric", "where"))
    methods = list(dict.fromkeys(row.method for row in rows))
    figure.set_size_inches(10, 1 + 0.16 * max(8, len(cases) * (len(methods) + 1)))
    height = 0.8 / len(methods)
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False, sharey=True)[0], metrics, strict=True):
        for i, method in enumerate(methods):
            found = [row for row in rows if (row.metric, row.method) == (metric, method)]
            y = [cases.index(row.where) + i * height for row in found]
            low = [row.value - (row.value if row.low is None else row.low) for row in found]
            high = [(row.value if row.high is None else row.high) - row.value for row in found]
            colour = COLOURS.get(method.removesuffix(REMAINDER))
            bars = {"label": method, "color": colour, "hatch": "///" if method.endswith(REMAINDER) else None}
            axes.barh(y, [row.value for row in found], height, xerr=[low, high], ecolor="#777777", **bars)
        sizes = [row.value for row in rows if row.metric == metric and row.value > 0]
        if len(sizes) == sum(row.metric == metric for row in rows) and max(sizes) > 100 * min(sizes):
            axes.set_xscale("log")
        axes.set(xlabel=metric, yticks=[i + 0.4 - height / 2 for i in range(len(cases))])
        axes.set_yticklabels([case or "" for case in cases])
    figure.axes[0].invert_yaxis()
    _legend(figure)


def _line(axes: Axes, method: str, x: list[float], rows: list[Row]) -> None:
    """Draw a line of values, with their intervals as a band."""
    style = {"color": COLOURS.get(method.removesuffix(REMAINDER)), "label": method}
    style["linestyle"] = "--" if method.endswith(REMAINDER) else "-"
    marker = MARKERS.get(method.removesuffix(REMAINDER), "o")
    axes.plot(x, [row.value for row in rows], marker=marker, markersize=5, **style)
    if all(row.low is not None for row in rows):
        low, high = ([getattr(row, edge) for row in rows] for edge in ("low", "high"))
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _log_ticks(axes: Axes, values: Sequence[float], base: int, shown: Callable[[float], str]) -> None:
    """Make the x axis logarithmic, with a tick at each of these values."""
    axes.set_xscale("log", base=base)
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: shown(value)))
    axes.xaxis.set_minor_locator(NullLocator())


def _legend(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")


def _methods(result: Result) -> list[str]:
    return ordered(result.config["methods"])
