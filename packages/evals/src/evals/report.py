"""The tables of a result, by task."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from hashtrain.config import RECENT, SINK
from hashtrain.reporting.worst import FIGURES, share

from evals.grid import HEADS, Grid, amount, cell_of, heads_of, percent
from evals.methods import DENSE, NAMES, TUNED
from evals.result import Result, Row

PHASES = {"everywhere": "sparse everywhere", "decode": "after a dense prompt, the scored rows sparse"}
RULES = {"visible": "of visible tokens", "fixed": "of the context, min 20"}

AT = " at "
"""Separates the name of a hasher of --more-hashers from its length."""
LSH = "lsh"


def grids(result: Result) -> list[Grid]:
    """Return the tables of a result, depending on its task."""
    task = result.config["task"]
    own = [codelength_grid(result)] if task == "codelength" else []
    return [*own, *{"ppl": ppl_grids, "iou": iou_grids}.get(task, plain_grids)(result)]


def ppl_grids(result: Result) -> list[Grid]:
    """Return tables of perplexity and divergence by method and budget, and of paired differences if there are any."""
    paired = dict.fromkeys(row.method for row in result.rows if row.against and row.metric == "kl")
    pairs = [ppl_pairs_grid(result, method) for method in paired]
    return [ppl_grid(result), *pairs, *(matched_grid(result, rival) for rival in result.config.get("match", []))]


def ppl_grid(result: Result) -> Grid:
    """Format perplexity, divergence and measured density by budget and method, three columns per rule."""
    config = result.config
    header, rules = ["budget, method"], config["rules"]
    for rule in rules:
        header += [f"perplexity, {RULES[rule]}", "KL", "density"]
    dense = result.one(method=DENSE, metric="perplexity")
    sections = [[[DENSE, *([f"{dense.value:.3f}", "0", percent(1)] * len(rules))]]]
    for budget in config["budgets"]:
        section = []
        for method in ordered(config["methods"]):
            line = [f"{percent(budget)}, {method}"]
            for rule in rules:
                line += _ppl_cells(result, {"method": method, "budget": budget, "rule": rule, "against": None})[1]
            section.append(line)
        sections.append(section)
    scored = "second half" if config["scored"] is None else f"last {config['scored']:,} tokens"
    scored = "all tokens" if config["score"] == "all" else scored
    title = (
        f"Perplexity (against dense) and mean KL from dense in nats, {_where(result, dense.n)}, {scored} scored, "
        f"{PHASES[config['phase']]}{_heads(config)}, {protocol(config)}"
    )
    return Grid(title, header, sections)


def _ppl_cells(result: Result, at: dict[str, Any]) -> tuple[Row, list[str]]:
    """Return a method's row of perplexity, and its perplexity, KL and density as cells."""
    found, ratio, kl = (result.one(metric=m, **at) for m in ("perplexity", "perplexity_ratio", "kl"))
    shown = f"{found.value:.3f} ({signed_percent(ratio.value)})"
    return found, [shown, f"{kl.value:.4f}", percent(found.density or 0)]


def protocol(config: dict[str, Any]) -> str:
    """Return a phrase on the tokens that every row of a run reads, and the layers that its settings keep dense."""
    ends = (("first", config.get("sink", 0)), ("last", config.get("recent", 0)))  # older runs had none
    named = " and ".join(f"the {which} {_counted(count, 'token')}" for which, count in ends if count)
    how = "read beside the budget" if config.get("ends") == "beside" else "always read"
    first, at = config.get("dense_layers", 0), config.get("dense_at") or []
    layers = [f"the first {_counted(first, 'layer')}"] * bool(first)
    layers += [f"layers {', '.join(map(str, at))}"] * bool(at)
    read = f"{named} {how}" if named else "no token read without a search"
    return f"{read}, {' and '.join(layers)} dense" if layers else f"{read}, no layer set to dense"


def _counted(count: int, what: str) -> str:
    return what if count == 1 else f"{count} {what}s"


def _heads(config: dict[str, Any]) -> str:
    return f", one selection {HEADS[config['heads'] + '_head']}" if config["heads"] else ""


def _unusual(config: dict[str, Any]) -> str:
    """Return a caption's note on the protocol, if it is known and not the default."""
    usual = {"sink": SINK, "recent": RECENT, "dense_layers": 0}
    changed = any(config.get(name, value) != value for name, value in usual.items()) or config.get("dense_at")
    return f", {protocol(config)}" if changed else ""


def ppl_pairs_grid(result: Result, method: str) -> Grid:
    """Format the paired differences between a method and each other one; below 0 it is closer to dense."""
    config = result.config
    rules = config["rules"]
    own = [row for row in result.rows if row.method == method and row.rule in rules and row.metric == "kl"]
    others = dict.fromkeys(row.against for row in own if row.against)
    header = ["budget, against", *(f"{m}, {RULES[rule]}" for rule in rules for m in ("KL", "NLL"))]
    sections = []
    for budget in config["budgets"]:
        section = []
        for other in others:
            at = {"method": method, "budget": budget, "against": other}
            found = [result.one(rule=rule, metric=metric, **at) for rule in rules for metric in ("kl", "nll")]
            section.append([f"{percent(budget)}, {other}", *map(_with_interval, found)])
        sections.append(section)
    title = (
        f"`{method}` minus each other method, paired over documents{_prompt(config)}{_unusual(config)}: "
        "mean difference in nats [95 % interval]"
    )
    return Grid(title, header, sections)


def matched_grid(result: Result, rival: str) -> Grid:
    """Format our methods at the density of a rival on each document, with the paired differences."""
    rule, sections, ppl = f"as {rival}", [], None
    for budget in result.config["budgets"]:
        at = {"budget": budget, "against": None}
        lines = []
        ours = dict.fromkeys(row.method for row in result.rows if row.rule == rule)
        for method, of in ((rival, result.config["rules"][0]), *((method, rule) for method in ours)):
            at |= {"method": method, "rule": of}
            ppl, cells = _ppl_cells(result, at)
            less = [
                _with_interval(result.one(**at | {"against": rival}, metric=m)) if method in ours else ""
                for m in ("kl", "nll")
            ]
            tokens = "as many tokens" if method in ours else percent(budget)
            lines.append([f"{tokens}, {method}", *cells, *less])
        sections.append(lines)
    assert ppl is not None
    header = ["tokens, method", "perplexity", "KL", "density", f"KL, less {rival}'s", f"NLL, less {rival}'s"]
    title = (
        f"At the density that `{rival}` takes on each context, {_where(result, ppl.n)}"
        f"{_prompt(result.config)}{_unusual(result.config)}; "
        "differences [95 % interval]"
    )
    return Grid(title, header, sections)


def iou_grids(result: Result) -> list[Grid]:
    """Return overlap by layer and method, one table per budget and kind of head."""
    budgets = result.config["budgets"]
    return [iou_grid(result, budget, heads) for budget in budgets for heads in reversed(heads_of(result.config))]


def iou_grid(result: Result, budget: float, heads: str) -> Grid:
    """Format IoU and attention mass, one line per layer and one column per method, with the mean over sparse layers."""
    config = result.config
    names = [name for name in ordered(config["methods"]) if name != DENSE]
    layers = sorted({row.layer for row in result.rows if row.layer is not None})
    sparse = [layer for layer in layers if layer >= config["dense_layers"] and layer not in config["dense_at"]]
    at = {"budget": budget, "heads": heads, "head": None}

    # Older runs lack them by head.
    worst = [metric for metric in ("low", "lost") if any(row.head is not None for row in result.select(metric=metric))]

    def by_head(name: str, metric: str, layer: int | None) -> list[float]:
        rows = result.select(method=name, metric=metric, budget=budget, heads=heads)
        wanted = sparse if layer is None else [layer]
        return [row.value for row in rows if row.head is not None and row.layer in wanted]

    def shown(name: str, layer: int | None) -> str:
        parts = [f"{result.one(method=name, layer=layer, metric=m, **at).value:.3f}" for m in ("iou", "mass")]
        of = {"low": lambda found: f"{min(found):.2f}", "lost": lambda found: share(max(found))}
        return " / ".join([*parts, *(of[metric](by_head(name, metric, layer)) for metric in worst)])

    def line(label: str, layer: int | None) -> list[str]:
        return [label, *(shown(name, layer) for name in names)]

    body = [line(f"{layer} (dense)" if layer not in sparse else str(layer), layer) for layer in layers]
    means = [result.one(method=n, layer=None, metric="iou", **at) for n in names]
    interval = ["IoU, 95 %", *(_interval(row, 3) for row in means)]
    n = means[0].n
    rows = ", of the last row" if config.get("rows_from") == "last" else ""
    what = (
        FIGURES if len(worst) == 2 else "IoU / attention mass" + ", its 5th percentile in the worst head" * len(worst)
    )
    title = f"{what} {HEADS[heads]}{rows}, top {percent(budget)} of visible tokens, {_where(result, n)}"
    return Grid(f"{title}, {protocol(config)}", ["layer", *names], [body, [line("mean", None), interval]])


class Code(NamedTuple):
    """A hash at a length."""

    kind: str
    """`lsh`, `planes`, ..."""
    bits: int
    """Bits of one hash function; `paper` has one per query head."""


def code_of(result: Result, row: Row) -> Code:
    """Return the hash and the length that a row belongs to. Raises: ValueError if the result lacks them."""
    if row.method.startswith("lsh-"):
        return Code(LSH, int(row.method.removeprefix("lsh-")))
    kind, _, bits = row.method.partition(AT)
    if bits:
        return Code(kind, int(bits))
    at = {"method": row.method, "heads": row.heads}
    equal, times = (result.one(metric=metric, **at).value for metric in ("equal_lsh_bits", "times_shorter"))
    return Code(kind, round(equal / times))


def equal_words(result: Result, row: Row) -> tuple[str, str]:
    """Return the length of untrained LSH that equals a learned hash, with its interval, and the ratio of the lengths.

    Args: row: of the metric `equal_lsh_bits`.
    """
    times = result.one(metric="times_shorter", method=row.method, heads=row.heads).value
    lengths = result.config["bits"]
    if row.value >= max(lengths):
        return f"more than {max(lengths)}", f"more than {times:.1f}"
    if row.value <= min(lengths):
        return f"{min(lengths)} or fewer", f"{times:.1f} or less"
    interval = "" if row.low is None or row.high is None else f" [{row.low:.0f}, {row.high:.0f}]"
    return f"{row.value:.0f}{interval}", f"{times:.1f}"


def codelength_grid(result: Result) -> Grid:
    """Format IoU by hash and length, LSH first, and the LSH length that equals each learned one, for both heads."""
    kinds = heads_of(result.config)
    order = {kind: i for i, kind in enumerate((LSH, *result.config["methods"]))}
    found: dict[Code, dict[str, Row]] = {}
    for row in result.select(metric="iou"):
        found.setdefault(code_of(result, row), {})[str(row.heads)] = row
    sections: dict[str, list[list[str]]] = {}
    for code in sorted(found, key=lambda code: (order[code.kind], code.bits)):
        line = [f"{code.kind}{AT}{code.bits}"]
        for heads in kinds:
            row = found[code][heads]
            equal = ["", ""]
            if code.kind != LSH:
                own = result.one(metric="equal_lsh_bits", method=row.method, heads=heads)
                equal = list(equal_words(result, own))
            line += [cell_of(row), *equal]
        sections.setdefault(code.kind, []).append(line)
    first = next(iter(next(iter(found.values())).values()))
    interval = " [95 % interval]" if first.n > 1 else ""
    title = (
        f"IoU with exact top-{percent(result.config['budgets'][0])} by bits of a code, and the length of untrained LSH "
        f"that equals it, mean of {first.n} held-out context{'s' * (first.n > 1)} of {result.config['context']} tokens"
        f"{interval}, model `{result.config['model']}`"
    )
    header = ["hash at bits"]
    for name in (HEADS[heads] for heads in kinds):
        header += [f"IoU {name}", "equal LSH bits", "times as many"]
    return Grid(title, header, list(sections.values()))


def sentences(result: Result) -> Iterator[str]:
    """Yield a sentence per learned hash about the length of untrained LSH that equals it."""
    for row in result.select(metric="equal_lsh_bits"):
        code, (words, times) = code_of(result, row), equal_words(result, row)
        kept = "" if row.bits == code.bits else f", of which a KV head stores {(row.bits or 0) // code.bits} codes"
        yield (
            f"{row.where}: LSH length that equals `{code.kind}` at {code.bits} bits{kept}: {words} bits, {times} times "
            "as many"
        )


def plain_grids(result: Result) -> list[Grid]:
    """Return the tables of any other task: one line per case and method, and tables by layer if there are any."""
    own = [row for row in result.rows if row.against is None and row.head is None]
    whole, layers = [row for row in own if row.layer is None], [row for row in own if row.layer is not None]
    found = [plain_grid(result, whole)] if whole else []
    for key in dict.fromkeys((row.metric, row.budget, row.where) for row in layers):
        found.append(layers_grid(result, [row for row in layers if (row.metric, row.budget, row.where) == key]))
    return found


def plain_grid(result: Result, rows: list[Row]) -> Grid:
    """Format one line per case, budget and method, one column per metric, with 95 % intervals where available."""
    metrics = list(dict.fromkeys(row.metric for row in rows))
    lines: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault((row.where, row.budget, row.method), {})[row.metric] = row
    sections: dict[Any, list[list[str]]] = {}
    for (where, budget, method), found in lines.items():
        rule = next(iter(found.values())).rule
        label = ", ".join(part for part in (where, None if budget is None else amount(budget, rule), method) if part)
        cells = [cell_of(found[metric]) if metric in found else "" for metric in metrics]
        density = next((row.density for row in found.values()), None)
        sections.setdefault((where, budget), []).append([label, *cells, "" if density is None else percent(density)])
    return Grid(_title(result, rows), ["case", *metrics, "density"], list(sections.values()))


def layers_grid(result: Result, rows: list[Row]) -> Grid:
    """Format one metric, one line per layer and one column per method."""
    methods = list(dict.fromkeys(row.method for row in rows))
    at = {(row.layer, row.method): row for row in rows}
    body = [
        [str(i), *(cell_of(at[i, m]) if (i, m) in at else "" for m in methods)]
        for i in sorted({row.layer for row in rows if row.layer is not None})
    ]
    first = rows[0]
    case = [first.metric, *([f"top {percent(first.budget)}"] if first.budget else []), *filter(None, [first.where])]
    return Grid(f"{', '.join(case)}: {_title(result, rows)}", ["layer", *methods], [body])


def _title(result: Result, rows: list[Row]) -> str:
    config = result.config
    counts = {row.n for row in rows}
    measured = f", mean of {rows[0].n} [95 % interval]" if len(counts) == 1 and rows[0].n else " [95 % interval]"
    measured = measured if any(counts) else ""
    code = f", {config['bits']}-bit codes, queries in {config['planes']} planes" if "planes" in config else ""
    return f"`{config['task']}`{measured}, model `{config['model']}`{code}{_unusual(config)}"


def signed_percent(ratio: float) -> str:
    """Format the change that a ratio means: 1.125 is `+12.5 %`."""
    return f"{100 * (ratio - 1):+.1f} %"


def _with_interval(row: Row) -> str:
    return f"{row.value:+.4f} {_interval(row, 4, sign='+')}".strip()


def _interval(row: Row, digits: int, sign: str = "") -> str:
    if row.low is None or row.high is None:
        return ""
    return f"[{row.low:{sign}.{digits}f}, {row.high:{sign}.{digits}f}]"


def _prompt(config: dict[str, Any]) -> str:
    """Return a note if only the scored rows are sparse."""
    return ", the prompt dense" if config["phase"] == "decode" else ""


def ordered(methods: list[str]) -> list[str]:
    """Sort methods as in `NAMES`, each tuned one after its original, without dense attention."""
    return [x for name in NAMES if name != DENSE for x in (name, name + TUNED) if x in methods]


def _where(result: Result, n: int) -> str:
    return f"{n} held-out contexts of {result.config['context']} tokens, model `{result.config['model']}`"
