"""The checks of a call and its plan, made once for arguments of one kind and then kept.

Checks that look at shapes, strides and numbers alone end the same way each time. What fails is never kept.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec

from hashcore import validation
from hashcore.cpu import plan
from hashcore.cpu.plan import Plan
from hashcore.validation import Comparison, Layout

PLANS, ROWS = 256, 1024  # how many are kept of each kind, and the most rows of one: 48 KiB

Arguments = ParamSpec("Arguments")


def kept(make: Callable[Arguments, Plan]) -> Callable[Arguments, Plan]:
    """Keep the last plans that a function made, by its arguments, which must be hashable and not given by name."""
    plans: dict[Any, Plan] = {}
    lock = threading.Lock()

    @functools.wraps(make)
    def get(*arguments: Arguments.args, **options: Arguments.kwargs) -> Plan:
        found = plans.get(arguments)
        if found is None:
            found = make(*arguments, **options)
            if len(found.rows) <= ROWS:
                with lock:
                    while len(plans) >= PLANS:
                        plans.pop(next(iter(plans)))
                    plans[arguments] = found
        return found

    return get


@functools.lru_cache(PLANS)
def comparison(query: Layout, keys: Layout, weights: tuple[int, ...] | None) -> Comparison:
    """Check what is compared (validation.comparison)."""
    return validation.comparison(query, keys, weights)


@kept
def score(query: Layout, keys: Layout, weights: tuple[int, ...] | None, most: int) -> Plan:
    """Check and plan ops.score on `most` threads."""
    return plan.score(*comparison(query, keys, weights), None, most)


@kept
def search(
    query: tuple[Any, ...],
    keys: tuple[Any, ...],
    weights: tuple[int, ...] | None,
    rows: tuple[int, int | None, int | None, int, int],
    best: bool,
    most: int,
    shortlist: int = 0,
) -> Plan:
    """Check and plan ops.search of rows that all have the same k, lengths, starts, sink and recent.

    query and keys are Layouts, or the same as plain tuples, which are made faster.
    """
    query, keys = Layout(*query), Layout(*keys)
    compared = comparison(query, keys, weights)
    validation.score_bits(compared.weights, compared.query.shape[-1])
    bounds = validation.bounds(keys.shape[-2], *rows)
    return plan.search(*compared, bounds[0], best, bounds, None, most, shortlist)


@kept
def ragged_search(compared: Comparison, width: int, best: bool, most: int, shortlist: int = 0) -> Plan:
    """Plan ops.search of checked arguments, whose rows differ: their bounds are still to be filled in."""
    return plan.search(*compared, width, best, None, None, most, shortlist)
