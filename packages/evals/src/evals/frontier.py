"""Loss of quality against bytes read: a common scale for methods of different kinds.

    share = (codes, or what a rival stores per token + keys and values read + state of the remainder) / dense bytes

for one layer's decode step at the middle of the rows that a run scored (`costs.traffic.step_bytes` of sparse_decode).
The oracle must read all keys to find its tokens. These bytes are left out, so that its line shows the limit of a
perfect search; it is never marked as the best.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from sparse_decode.budget import Budget
from sparse_decode.costs.traffic import step_bytes

from evals.figures import COLOURS, MARKERS, save
from evals.grid import Grid, cell_of, percent
from evals.methods import REMAINDER, TUNED
from evals.result import Result, Row
from evals.rivals import RIVALS

ORACLE = "oracle"


@dataclass(frozen=True)
class Point:
    """One method at one budget.

    Attributes:
        settings: non-default search and reading settings, as text; empty by default.
        reads: what its steps read.
        share: bytes read, relative to dense attention.
        best: whether no other point, except the oracle's, has both fewer bytes and a smaller KL.
    """

    method: str
    settings: str
    budget: float
    reads: Budget
    share: float
    perplexity: Row
    kl: Row
    best: bool = False

    @property
    def line(self) -> str:
        """Name of its line in the figure."""
        return f"{self.method}, {self.settings}" if self.settings else self.method


def points(results: Iterable[Result], head_dim: int) -> list[Point]:
    """Return the methods and budgets of runs of `ppl`, sorted by bytes.

    Args: results: of comparable runs (`require_comparable`); head_dim: of the model's keys and values.
    """
    found = [
        _point(result, row, head_dim)
        for result in results
        for row in result.select(metric="kl", against=None)
        # Runs do not store the parameters of tuned rivals, which decide their bytes.
        if row.budget is not None and not row.rule.startswith("as ") and not row.method.endswith(TUNED)
    ]
    found.sort(key=lambda point: (point.share, point.kl.value))
    least, marked = float("inf"), []
    for point in found:
        real = point.method != ORACLE
        marked.append(replace(point, best=real and point.kl.value < least))
        least = min(least, point.kl.value) if real else least
    return marked


def require_comparable(results: Sequence[Result]) -> None:
    """Raise ValueError if a run is not of `ppl`, or runs differ in what they were evaluated on."""
    for result in results:
        if result.config["task"] != "ppl":
            raise ValueError(f"the frontier takes runs of ppl, got one of {result.config['task']}; leave it out")
    for name in ("model_identity", "context", "scored", "phase", "documents", "text"):
        given = {str(result.config.get(name)) for result in results}
        if len(given) > 1:
            raise ValueError(
                f"the runs must have one model, text and protocol, got {name} {' and '.join(sorted(given))}; give runs "
                "that agree in it"
            )


def _point(result: Result, row: Row, head_dim: int) -> Point:
    config = result.config
    times, values = config.get("shortlist"), config.get("values", 1.0)
    n = config["context"] - (config.get("scored") or config["context"] // 2) // 2
    name, remainder = row.method.removesuffix(REMAINDER), row.method.endswith(REMAINDER)
    rival = RIVALS.get(name)
    assert row.budget is not None
    bits, count = row.bits or 0, row.budget
    if rival is not None:  # rivals choose their own number of tokens
        assert row.density is not None
        bits, count = rival.kept_bits(rival.published[0], head_dim), row.density
    hashes = bits > 0 and rival is None
    divided = {name: hashes and config.get(name, False) for name in ("by_layer", "by_head")}
    how_read = {"shortlist": times, "values": values, **divided} if hashes else {}
    budget = Budget(count, sink=row.sink, recent=row.recent, **how_read)
    even = replace(budget, by_layer=False, by_head=False)  # the mean over layers and heads is the budget all the same
    read = step_bytes(n, even, head_dim, bits=bits, remainder=remainder)
    at = {"method": row.method, "budget": row.budget, "rule": row.rule, "against": None}
    perplexity = result.one(**at, metric="perplexity_ratio")
    return Point(row.method, how_read_in_words(budget), row.budget, budget, read.share, perplexity, row)


def how_read_in_words(budget: Budget) -> str:
    """Return how a budget's tokens are searched and read; "" if all codes are, and all values."""
    how = [] if budget.shortlist is None else [f"shortlist {budget.shortlist}"]
    how += [f"values {100 * budget.values:.0f} %"] * (budget.values < 1)
    return ", ".join([*how, *(name.replace("_", " ") for name in ("by_layer", "by_head") if getattr(budget, name))])


def grid(found: Sequence[Point], taken: Sequence[float | None] | None = None, where: str = "") -> Grid:
    """Format points as a table, sorted by bytes.

    Args: taken: milliseconds of each point's step, where measured; where: how they were measured, for the note.
    """
    header = ["method", "tokens read", "bytes", "perplexity over dense", "KL, nats", "on the frontier"]
    lines: list[list[str]] = []
    for point in found:
        shares, measured = (point.budget, point.share), (point.perplexity, point.kl)
        lines.append([point.line, *map(percent, shares), *map(cell_of, measured), "yes" if point.best else ""])
    note = "Bytes of one layer's decode step, of those of dense attention; `oracle` without what it takes to find them."
    if taken is not None:
        header.append("ms of a step")
        lines = [[*line, "" if ms is None else f"{ms:.1f}"] for line, ms in zip(lines, taken, strict=True)]
        note += f" Milliseconds of a decode step of the whole model: {where}."
    return Grid("Quality against bytes read", header, [lines], note)


def draw(found: Sequence[Point], path: Path, taken: Sequence[float | None] | None = None, where: str = "") -> None:
    """Draw the change of perplexity and the KL over bytes to a PNG, and below over the time of a step if measured."""
    figure = Figure(figsize=(10, 5 if taken is None else 8), layout="constrained")
    panels = figure.subplots(1 if taken is None else 2, 2, squeeze=False)
    _panels(panels[0], found, [100 * point.share for point in found], "bytes read, % of dense attention's")
    for panel in panels[0]:
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
    if taken is not None:
        _panels(panels[1], found, taken, "milliseconds of a decode step of the whole model")
        figure.suptitle(f"Steps: {where}", fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    save(figure, path)


def _panels(axes: Sequence[Axes], found: Sequence[Point], places: Sequence[float | None], label: str) -> None:
    """Draw the change of perplexity and the KL over places; points without one are left out."""
    left, right = axes
    for line in dict.fromkeys(point.line for point in found):
        own = [(point, x) for point, x in zip(found, places, strict=True) if point.line == line and x is not None]
        if not own:
            continue
        of, xs = [point for point, _ in own], [x for _, x in own]
        _line(left, of[0], xs, [100 * (point.perplexity.value - 1) for point in of])
        _line(right, of[0], xs, [point.kl.value for point in of])
    left.set_yscale("symlog", linthresh=1)
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:+g} %"))
    left.axhline(0, color="#999999", linewidth=0.8)
    left.set_ylabel("change of perplexity")
    right.set(yscale="log", ylabel="mean KL from dense, nats")
    for panel in axes:
        panel.set_xlabel(label)


def _line(axes: Axes, first: Point, places: Sequence[float], heights: Sequence[float]) -> None:
    name = first.method.removesuffix(REMAINDER)
    plain = "-" if first.method == name else "--"
    dotted = (plain, "-.", ":", (0, (1, 3)))[first.settings.count(",") + bool(first.settings)]
    style = {"color": COLOURS.get(name), "marker": MARKERS.get(name, "o"), "markersize": 5, "linestyle": dotted}
    axes.plot(places, heights, label=first.line, **style)
