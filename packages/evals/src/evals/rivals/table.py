"""The table of rivals: one entry per rival, with everything the other modules need. To add one, see CONTRIBUTING.md."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_decode import Selector

Parameters = Mapping[str, int]


@dataclass(frozen=True)
class Rival:
    """One rival: its name, how to build it, what it stores, and what is tuned.

    Its selector has `after_prompt` if it behaves differently after a dense prompt (`evals.methods.PromptAware`), and
    counts `sampled` and `empty` if it draws its tokens (`evals.methods.Sampling`).
    """

    name: str
    summary: str
    """Its line in `evals list`."""
    build: "Callable[..., Selector]"
    """Returns its selector, given its parameters as keywords."""
    published: tuple[Parameters, ...]
    """Published sets of all its parameters; the method of this name uses the first."""
    kept_bits: Callable[[Parameters, int], int]
    """Returns the bits that it stores per token and KV head, from its parameters and head_dim."""
    grid: Mapping[str, str | tuple[int, ...]]
    """For each parameter, the values that `evals tune` tries, or the name of the command's setting that lists them."""
    query_heads: "Callable[..., Selector] | None" = None
    """Returns the form with one set per query head, if `build` gives one per KV head and `iou` should measure both."""
    code_bits: Callable[[Parameters], int] | None = None
    """Returns the bits of its codes per token and KV head, if it stores codes."""
    variant: str = ""
    """The kind of selector, if several entries share it; otherwise its name."""
    identity_settings: tuple[str, ...] = ()
    """Attributes of its selector, besides its parameters, that affect its selections; part of its identity."""

    def require(self, parameters: Parameters) -> None:
        """Raise ValueError unless these are its parameters."""
        if parameters.keys() != self.published[0].keys():
            expected, got = ", ".join(self.published[0]), ", ".join(parameters) or "none"
            raise ValueError(f"{self.name} takes the parameters {expected}, got {got}; give each of these once")


def _quest_bits(parameters: Parameters, head_dim: int) -> int:
    """Return the bits for a minimum and a maximum key per page, 16 bits per number."""
    return 2 * 16 * head_dim // parameters["page"]


def _bucket_bits(parameters: Parameters, head_dim: int = 0) -> int:
    """Return the bits for a bucket of K bits in each of L tables, without the tables' pointers."""
    return parameters["bits"] * parameters["tables"]


def _built(where: str, **parameters: Any) -> "Selector":
    """Build a selector from where it is: a module below this package, and a class."""
    return resolve_name(f"evals.rivals.{where}")(**parameters)


_quest = partial(_built, "quest:QuestSelector")
_quest_heads = partial(_quest, per_query_head=True)


def _magicpig(name: str, summary: str, published: tuple[Parameters, ...], sink: int = 4, local: int = 64) -> Rival:
    return Rival(
        name,
        summary,
        partial(_built, "magicpig:MagicPigSelector", sink=sink, local=local),
        published,
        _bucket_bits,
        {"bits": "bits", "tables": "tables"},
        code_bits=_bucket_bits,
        variant="magicpig",
        identity_settings=("sink", "local", "prefill", "seed"),
    )


_OF_QUEST: tuple[tuple[Parameters, ...], Callable[..., int], Mapping[str, str]]
_OF_QUEST = ({"page": 16},), _quest_bits, {"page": "pages"}
"""Quest's published page size, its bits, and its grid."""
_SPOTLIGHT: Parameters = {"bits": 15, "tables": 100}
"""MagicPIG's parameters in the Spotlight Attention paper."""
_AUTHORS: Parameters = {"bits": 10, "tables": 150}
"""MagicPIG's default parameters in its authors' code."""
RIVALS = {
    rival.name: rival
    for rival in (
        Rival(
            *("quest", "pages of 16 by their least and greatest keys, one set per KV head", _quest, *_OF_QUEST),
            query_heads=_quest_heads,
        ),
        Rival("quest-heads", "the same, one set per query head, as published", _quest_heads, *_OF_QUEST),
        _magicpig(
            "magicpig",
            "samples by 100 hash tables of 15 bits, as in the Spotlight paper, 4 sink and 64 local tokens; "
            "ignores the budget",
            (_SPOTLIGHT, _AUTHORS),
        ),
        _magicpig("magicpig-sink", "magicpig with its sink and no local tokens", (_SPOTLIGHT, _AUTHORS), 4, 0),
        _magicpig("magicpig-local", "magicpig with its local and no sink tokens", (_SPOTLIGHT, _AUTHORS), 0, 64),
        _magicpig("magicpig-bare", "the same without sink and local tokens", (_SPOTLIGHT, _AUTHORS), 0, 0),
        _magicpig(
            "magicpig-10x150", "magicpig with 150 tables of 10 bits, the default of its authors", (_AUTHORS, _SPOTLIGHT)
        ),
    )
}
"""All rivals, in the order of `evals list`."""


def rival_named(name: str) -> Rival:
    """Return a rival's entry. Raises: ValueError if there is none."""
    if name not in RIVALS:
        known = ", ".join(RIVALS)
        raise ValueError(f"unknown rival {name}: expected one of {known}; use one of these, or add an entry to RIVALS")
    return RIVALS[name]
