"""Checks of a command's settings, with their errors."""

from collections.abc import Collection
from typing import Any

from hashtrain.usage import UsageError, meant, require_counts


def each_once(command: Any, name: str) -> None:
    """Raise UsageError if a field of several values is empty or has a value twice."""
    given = getattr(command, name)
    if not given or len(set(given)) < len(given):
        got = " ".join(map(str, given)) or "none"
        raise UsageError(f"--{name} needs one value or more, without repeats, got {got}")


def each_a_share(command: Any, name: str, remark: str = "; 0.02 selects 2 %") -> None:
    """Raise UsageError unless a share, or each of several, is above 0 and at most 1; None is no share."""
    given = getattr(command, name)
    for value in given if isinstance(given, tuple) else (given,):
        if value is not None and not 0 < value <= 1:
            raise UsageError(f"--{name} must be above 0 and at most 1, got {value:g}{remark}")


def one_budget(command: Any, task: str) -> None:
    """Raise UsageError if a task that takes one budget has several."""
    if len(command.budgets) != 1:
        raise UsageError(f"--budgets of {task} takes one, got {len(command.budgets)}")


def left_out(command: Any, name: str, task: str, why: str, usual: object = None) -> None:
    """Raise UsageError if a field that means nothing to a task is given."""
    if (given := getattr(command, name)) != usual:
        raise UsageError(f"{task} takes no --{name}, got {given}: {why}; leave it out")


def each_among(command: Any, name: str, known: Collection[str], task: str = "") -> None:
    """Raise UsageError if a field of several names has one that is not known."""
    if unknown := [one for one in getattr(command, name) if one not in known]:
        of = f" of {task}" if task else ""
        raise UsageError(f"--{name}{of} takes no {meant(unknown, known)}")


def each_positive(command: Any, name: str) -> None:
    """Raise UsageError if a field of several numbers is empty, has one twice, or has one below 1."""
    each_once(command, name)
    require_counts(command, **{name: 1})
