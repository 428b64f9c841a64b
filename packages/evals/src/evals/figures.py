"""Draw the figure of a result: one panel for each metric."""

from pathlib import Path
from typing import Any

from hashtrain.files.atomic import replace
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from evals.methods import REMAINDER
from evals.results import Result, Row
from evals.tables import BY_LAYER, HEADS, SHOWN, percent

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
    "quest": "#009e73",
    "quest-heads": "#006a4e",
    "quest-page4": "#4cbf96",
    "quest-heads-page4": "#3f8f78",
    "magicpig": "#0072b2",
    "magicpig-sink": "#3f94c6",
    "magicpig-local": "#5fa6cf",
    "magicpig-bare": "#7fb8d8",
}


def draw(result: Result, path: Path) -> None:
    """Draw a result to a PNG: lines over layers if it has them, else over budgets if there are several, else bars."""
    shown = SHOWN.get(result.config["task"])
    rows = [row for row in result.rows if row.head is None and row.against is None]
    layers = [row for row in rows if row.layer is not None and (shown is None or row.metric in BY_LAYER)]
    whole = [row for row in rows if row.layer is None and (shown is None or row.metric in shown)]
    budgets = sorted({row.budget for row in whole if row.budget is not None})
    if layers:
        rows, how = [row for row in layers if row.budget in (None, layers[0].budget)], "layer"
    elif len(budgets) > 1:
        rows, how = [row for row in whole if row.budget is not None], "budget"
    else:
        rows, how = whole, "bars"
    metrics = list(dict.fromkeys(row.metric for row in rows))
    cases = list(dict.fromkeys(map(_case, rows)))
    methods = list(dict.fromkeys(row.method for row in rows))
    figure = Figure(figsize=(4 + 3.5 * len(metrics), 4), layout="constrained")
    if how == "bars":
        figure.set_size_inches(4 + 3.5 * len(metrics), 1.2 + 0.16 * max(8, len(cases) * (len(methods) + 1)))
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        own = [row for row in rows if row.metric == metric]
        if how == "bars":
            _bars(axes, own, cases, methods)
        else:
            _lines(axes, own, how)
        axes.set_title(metric)
    if how == "budget":
        for axes in figure.axes:
            _log_ticks(axes, budgets)
    named = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named.keys(), loc="outside right center", fontsize="small")
    replace(path, lambda temporary: figure.savefig(temporary, dpi=120, format="png"))


def _case(row: Row) -> str:
    rule = "" if row.rule in ("visible", "tokens", "dense") else row.rule
    return ", ".join(part for part in (row.where, HEADS.get(row.heads or ""), rule) if part)


def _lines(axes: Axes, rows: list[Row], over: str) -> None:
    """Draw a line for each method and case, with its intervals as a band."""
    for method, case in dict.fromkeys((row.method, _case(row)) for row in rows):
        own = [row for row in rows if (row.method, _case(row)) == (method, case)]
        places = [float(getattr(row, over)) for row in own]
        style = {"color": _colour(method), "linestyle": "--" if method.endswith(REMAINDER) else "-"}
        label = ", ".join(part for part in (method, case) if part)
        axes.plot(places, [row.value for row in own], marker="o", markersize=4, label=label, **style)
        ends = [(row.low, row.high) for row in own if row.low is not None and row.high is not None]
        if len(ends) == len(own):
            low, high = zip(*ends, strict=True)
            axes.fill_between(places, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xlabel(over)


def _bars(axes: Axes, rows: list[Row], cases: list[str], methods: list[str]) -> None:
    """Draw a group of bars for each case, one bar for each method."""
    height = 0.8 / len(methods)
    for i, method in enumerate(methods):
        own = [row for row in rows if row.method == method]
        places = [cases.index(_case(row)) + i * height for row in own]
        low = [row.value - (row.value if row.low is None else row.low) for row in own]
        high = [(row.value if row.high is None else row.high) - row.value for row in own]
        style: dict[str, Any] = {"color": _colour(method), "hatch": "///" if method.endswith(REMAINDER) else None}
        axes.barh(places, [row.value for row in own], height, xerr=[low, high], ecolor="#777777", label=method, **style)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(cases))], cases)
    axes.invert_yaxis()


def _log_ticks(axes: Axes, budgets: list[float]) -> None:
    """Make the x axis logarithmic, with a tick at each budget."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: percent(value)))
    axes.xaxis.set_minor_locator(NullLocator())


def _colour(method: str) -> str | None:
    return COLOURS.get(method.removesuffix(REMAINDER))
