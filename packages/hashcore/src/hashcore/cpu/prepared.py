"""Caches of checked plans, by the shapes, strides and integers that they depend on. Failures are not cached."""

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec

from hashcore import validation
from hashcore.arrays import Layout
from hashcore.cpu import launch_plan
from hashcore.cpu.launch_plan import Plan
from hashcore.validation import Comparison

PLANS, ROWS = 256, 1024  # number of cached plans of each kind, and maximal number of rows of a cached plan: 48 KiB

Arguments = ParamSpec("Arguments")


def kept(make: Callable[Arguments, Plan]) -> Callable[Arguments, Plan]:
    """Cache the last plans of a function by its positional arguments, which must be hashable."""
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
    """Check the arguments of a score (validation.comparison), cached."""
    return validation.comparison(query, keys, weights)


@kept
def score(query: Layout, keys: Layout, weights: tuple[int, ...] | None, most: int) -> Plan:
    """Check and plan host.score on `most` threads."""
    return launch_plan.score(*comparison(query, keys, weights), None, most)


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
    """Check and plan host.search for rows that all have the same k, lengths, starts, sink and recent.

    query and keys are Layouts, or equal plain tuples, which are faster to create.
    """
    query, keys = Layout(*query), Layout(*keys)
    compared = comparison(query, keys, weights)
    validation.score_bits(compared.weights, compared.query.shape[-1])
    bounds = validation.bounds(keys.shape[-2], *rows)
    return launch_plan.search(*compared, bounds[0], best, bounds, None, most, shortlist)


@kept
def ragged_search(compared: Comparison, width: int, best: bool, most: int, shortlist: int = 0) -> Plan:
    """Plan host.search for checked arguments whose rows differ; `launch_plan.filled` sets the bounds of the rows."""
    return launch_plan.search(*compared, width, best, None, None, most, shortlist)
