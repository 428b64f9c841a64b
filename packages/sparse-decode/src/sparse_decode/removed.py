"""Arguments of earlier versions, and what to do instead."""

from collections.abc import Mapping

OF_ATTACH = {
    "exact": "exact mode was at most 1.23 times as fast as dense steps; omit it, or leave the model dense",
}
"""Why each argument of `attach` left, and the remedy."""


def refuse(name: str, left: Mapping[str, str], given: Mapping[str, object]) -> None:
    """Raise ValueError for an argument that has left a function, and TypeError for one that it never had."""
    for argument in given:
        if argument not in left:
            raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}")
        raise ValueError(f"{name} no longer takes {argument}: {left[argument]}")
