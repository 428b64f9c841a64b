"""Other ways to spend 16 bytes on a key, each at its best: what `evals codes` compares the hashers' codes with.

This table of them imports no torch, so that `--help` can list them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evals.codes.base import Code, Training


def _fitted(training: "Training", kind: str, **options: int) -> "Code":
    return resolve_name(f"evals.codes.{kind}")(training, **options)


@dataclass(frozen=True)
class Entry:
    """A code: how to fit it to a KV head, and the heads that it can store in 16 bytes."""

    fit: "Callable[[Training], Code]"
    stored: str
    """What the 16 bytes are, for tables."""
    most: int | None = None
    """Largest head_dim."""
    multiple: int = 1
    """What head_dim must be a multiple of."""
    keys: int = 2
    """Fewest training keys."""


CODES = {
    "pq-16x8": Entry(
        partial(_fitted, kind="product:ProductCode", parts=16), "16 numbers of 8 bits", multiple=16, keys=256
    ),
    "pq-32x4": Entry(
        partial(_fitted, kind="product:ProductCode", parts=32), "32 numbers of 4 bits", multiple=32, keys=16
    ),
    "itq": Entry(partial(_fitted, kind="signs:ItqCode"), "128 signs"),
    "rabitq": Entry(partial(_fitted, kind="signs:RaBitQCode"), "112 signs, a factor of 16 bits", most=112),
    "turboquant": Entry(partial(_fitted, kind="signs:TurboMseCode"), "112 signs, a length of 16 bits", most=112),
    "turboquant-product": Entry(
        partial(_fitted, kind="signs:TurboProductCode"), "64 and 32 signs, two lengths of 16 bits", most=64
    ),
}
"""By name."""


def require_usable(names: Sequence[str], head_dims: Iterable[int], keys: int) -> None:
    """Raise ValueError unless the codes can store heads of these sizes, and can be fitted on so many keys."""
    for name in names:
        entry = CODES[name]
        for head_dim in head_dims:
            if head_dim % entry.multiple or head_dim > (entry.most or head_dim):
                limit = "" if entry.most is None else f" of at most {entry.most}"
                raise ValueError(
                    f"{name} takes head_dim{limit}, a multiple of {entry.multiple}, got {head_dim}; leave it out of "
                    "--codes"
                )
        if keys < entry.keys:
            raise ValueError(
                f"{name} needs at least {entry.keys} training keys, got {keys}; raise --training-keys or "
                "--training-contexts"
            )
