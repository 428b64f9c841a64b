"""Code lengths: the IoU of each hash at each length, and the length of untrained LSH that equals it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from evals.grid import HEADS, Grid, cell_of, heads_of, percent
from evals.result import Result, Row

AT = " at "
"""Separates the name of a hasher of --more-hashers from its length."""
LSH = "lsh"


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
