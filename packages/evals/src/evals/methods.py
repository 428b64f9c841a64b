"""The table of methods: every way of choosing tokens that a task can measure, and how to load it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import hashtrain
import sparse_decode
from hashtrain.run.recipes import ABLATIONS, ALL, EXACT
from hashtrain.usage import did_you_mean

from evals.rivals.table import RIVALS

if TYPE_CHECKING:
    from sparse_decode import Selector

REMAINDER = "+remainder"
_TOLD = ("sink", "local", "prefill", "seed")
"""Settings of a rival, besides its parameters, that its identity tells."""


@dataclass(frozen=True)
class LoadedMethod:
    """A method that is ready to run."""

    name: str
    variant: str
    """The kind of selector; for a hasher, its variant."""
    bits: int | None
    """Code bits per token and KV head, over all functions (`paper` has one per query head); None if it stores none."""
    identity: str
    """Changes whenever its selections may change; protects resumed runs."""
    selector: "Selector | None"
    """One set per KV head, as deployed; None is dense attention."""
    query_head_selector: "Selector | None"
    """One set per query head, the paper's quality protocol."""
    remainder: bool = False
    """Whether the unselected tokens are added back (eq. 15, 16), as `attach` does by default."""
    by_query_head: bool = False
    """Whether it selects per query head by default, as in the paper's exact setup."""
    heads: str | None = None
    """`query_head` if `for_heads` has given `selector` one set per query head."""

    def for_heads(self, heads: Literal["kv", "query"] | None) -> "LoadedMethod":
        """Return the method with selections per KV head or per query head; None: its default.

        Raises: ValueError if it has no such form.
        """
        if self.selector is not None and self.query_head_selector is None:
            if heads == "kv":
                raise ValueError(f"{self.name} selects only per query head, got --heads kv; leave --heads out")
            return self
        if self.selector is None or (heads or ("query" if self.by_query_head else "kv")) == "kv":
            return self
        changed = {"selector": self.query_head_selector, "identity": self.identity + "-query-heads"}
        return replace(self, **changed, heads="query_head")

    def selector_after(self, prompt: int | None) -> "Selector | None":
        """Return the selector for rows after a dense prompt of this many tokens; None: every row is sparse.

        Where every row is sparse, the rivals leave the first rows of a text dense. After a dense prompt they have no
        such rows, and MagicPIG centres by the prompt's keys, as in their authors' code.
        """
        after_prompt: Any = getattr(self.selector, "after_prompt", None)
        return self.selector if prompt is None or after_prompt is None else after_prompt(prompt)


def _load_rival(name: str) -> LoadedMethod:
    """Create a rival with the parameters of its entry."""
    rival = RIVALS[name]
    selector = rival.build()
    given = (f"{key}{value}" for key, value in sorted(rival.parameters.items()))
    more = (str(value) for key in _TOLD if (value := getattr(selector, key, None)) is not None)
    both = replace(cast(Any, selector), per_query_head=True) if rival.for_both_heads else None
    variant, bits = getattr(selector, "variant", name), getattr(selector, "code_bits", None)
    return LoadedMethod(name, variant, bits, "-".join((name, *given, *more)), selector, both)


def load_method(name: str, folder: Path) -> LoadedMethod:
    """Load a rival, a selector of ours, or a hasher in a folder of them.

    Raises: ValueError if the hasher is missing or damaged, or has no remainder that it needs.
    """
    if name in RIVALS:
        return _load_rival(name)
    if name == DENSE:
        return LoadedMethod(name, name, None, name, None, None)
    if name in ("oracle", "recent"):
        kind = sparse_decode.OracleSelector if name == "oracle" else sparse_decode.RecentSelector
        by_query_head = sparse_decode.OracleSelector(per_query_head=True) if name == "oracle" else kind()
        return LoadedMethod(name, name, None, name, kind(), by_query_head)
    path = folder / name.removesuffix(REMAINDER)
    hasher, remainder = hashtrain.Hasher.from_pretrained(path), name.endswith(REMAINDER)
    if remainder and all(hasher.remainder(layer) is None for layer in range(len(hasher.layers))):
        raise ValueError(
            f"the hasher `{path.name}` in {path.parent} has no remainder: retrain it with `uv run hashtrain`"
        )
    # The config names its weight file, which is named after its content.
    identity = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()[:12]
    bits, own = hasher.layer(0).key_bits, path.name in (recipe.name for recipe in EXACT)
    forms = sparse_decode.HashSelector(hasher), sparse_decode.HashSelector(hasher, per_query_head=True)
    return LoadedMethod(name, hasher.config.variant, bits, identity, *forms, remainder, by_query_head=own)


DENSE = "dense"
_COMPLETED = ("lsh", "paper", "planes", "transform")
METHODS: dict[str, str] = {
    DENSE: "every visible token: what the others are measured against",
    "oracle": "the largest exact attention: the bound of any selection",
    "recent": "the last tokens: a sliding window of the same size",
    "lsh": "signs of a random rotation, untrained",
    "paper": "the paper's MLP, from a random start",
    "planes": "one key code per KV head, queries in bit planes",
    "transform": "keys as digits of a few coordinates, more where they differ more",
    **{name + REMAINDER: f"{name}, and what it leaves out as one token" for name in _COMPLETED},
    **{recipe.name: f"ablation: {recipe.summary}" for recipe in ABLATIONS if recipe.name != "planes"},
    **{recipe.name: f"per query head: {recipe.summary}" for recipe in EXACT},
    "transform-start" + REMAINDER: "transform-start, and what it leaves out as one token",
    **{name: rival.summary for name, rival in RIVALS.items()},
}
"""Every method that a task can measure, and what it is; `evals list` prints it."""
NAMES = tuple(METHODS)
SPARSE_NAMES = tuple(name for name in NAMES if name != DENSE)
_RARE = (*RIVALS, *(recipe.name for recipe in (*ABLATIONS, *EXACT)))
DEFAULT_NAMES = tuple(n for n in SPARSE_NAMES if n.removesuffix(REMAINDER) not in _RARE)
_ONE_FORM = tuple(name for name, rival in RIVALS.items() if not rival.for_both_heads)
SELECTION_NAMES = tuple(n for n in SPARSE_NAMES if not n.endswith(REMAINDER) and n not in _ONE_FORM)
"""Methods that differ in what they select, for either kind of head; the others differ in what they do with it."""
SELECTION_DEFAULTS = tuple(name for name in SELECTION_NAMES if name not in _RARE)
_HASHED = {recipe.name for recipe in ALL}
OURS = ("planes", "planes" + REMAINDER, "transform", "transform" + REMAINDER)


def in_table(name: str) -> str:
    """Return a method's name in the table: `transform` for `4k/transform`, the hasher of the folder `4k`."""
    return name.rpartition("/")[2]


def known(names: Sequence[str]) -> list[str]:
    """Return the methods of the table, and those of `names` that take a hasher from a folder below the hashers'.

    So one run can compare several trainings.
    """
    below = (name for name in names if "/" in name and in_table(name) in NAMES and _hasher_of(name))
    return [*NAMES, *(name for name in below if not {"", ".", ".."} & set(name.split("/")))]


def _hasher_of(name: str) -> str | None:
    """Return the path of a method's hasher below the hashers' folder; None if the method needs none."""
    path = name.removesuffix(REMAINDER)
    return path if in_table(path) in _HASHED else None


def without_hasher(names: Sequence[str], folder: Path) -> list[str]:
    """Return the hashers that `names` need and the folder lacks."""
    needed = dict.fromkeys(path for name in names if (path := _hasher_of(name)))
    return [path for path in needed if not (folder / path / "config.json").is_file()]


def _no_hashers(lacking: Sequence[str], folder: Path) -> str:
    """Say which hashers a folder lacks, and what to do about it."""
    from hashtrain.hasher import hashers_in  # imported here: `--help` lists the methods without torch

    if (folder / "config.json").is_file():
        return f"--hashers {folder} is one hasher; give the folder that holds it: --hashers {folder.parent}"
    where = (folder / lacking[0]).parent
    names = " ".join(in_table(path) for path in lacking if (folder / path).parent == where)
    train = f"uv run hashtrain --only {names} --out {where}"
    said = f"no hasher {', '.join(lacking)} in {folder}; train with `{train}` (and --model, unless for the demo model)"
    there = hashers_in(folder)
    return f"{said}, or measure only what it holds: --methods {' '.join(there)}" if there else said


def load_methods(names: Sequence[str], folder: Path, model_config: Any) -> list[LoadedMethod]:
    """Load methods, in the table's order.

    Args:
        names: of `known` methods.
        folder: holds one folder per hasher, as `hashtrain` writes them.
        model_config: of the model to select for.
    Raises: ValueError if a name is unknown, or a hasher is missing, damaged or of another model.
    """
    table = known(names)
    if unknown := [name for name in names if name not in table]:
        raise ValueError(f"unknown method {did_you_mean(unknown, NAMES)}")
    if lacking := without_hasher(names, folder):
        raise ValueError(_no_hashers(lacking, folder))
    loaded = [load_method(name, folder) for name in table if name in names]
    for method in loaded:
        if method.selector is not None:
            method.selector.require_match(model_config)
    return loaded
