"""The table of rivals: one entry per rival, with everything the other modules need. To add one, see CONTRIBUTING.md."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from evals.rivals.magicpig import MagicPigSelector
    from evals.rivals.quest import QuestSelector

Parameters = Mapping[str, int]


class Rival(NamedTuple):
    """One rival.

    Its selector has `after_prompt` if it behaves differently after a dense prompt. If it draws its tokens, it counts
    the rows and heads that it `sampled`, and how many of them stayed `empty`. Its `kept_bits` are those that it
    stores per token and KV head, its `code_bits` those of codes among them.
    """

    summary: str
    """Its line in `evals list`."""
    selector: str
    """Its selector: a module of this package, and a class."""
    parameters: Parameters
    """What its paper sets, but the pages of `-page4`; the method's identity tells them."""
    settings: Mapping[str, int]
    """The other arguments of its selector."""

    def build(self) -> "QuestSelector | MagicPigSelector":
        """Return its selector."""
        selector: Any = resolve_name(f"evals.rivals.{self.selector}")
        return selector(**self.parameters, **self.settings)

    @property
    def for_both_heads(self) -> bool:
        """Whether `iou` should measure it with one set per KV head, and with one per query head."""
        return self.settings.get("per_query_head") is False


_QUEST, _MAGICPIG = "quest:QuestSelector", "magicpig:MagicPigSelector"
_PAGE: Parameters = {"page": 16}
_SMALL: Parameters = {"page": 4}
"""Of 4, 8, 16 and 32 the page with the least KL on the demo model's training sources."""
_SPOTLIGHT: Parameters = {"bits": 15, "tables": 100}
"""MagicPIG's parameters in the Spotlight Attention paper."""
_AUTHORS: Parameters = {"bits": 10, "tables": 150}
"""MagicPIG's default parameters in its authors' code."""
_GROUP, _HEADS = {"per_query_head": False}, {"per_query_head": True}
_PAGES = "pages of 16 by their least and greatest keys, one set per KV head"
_TABLES = (
    "samples by 100 hash tables of 15 bits, as in the Spotlight paper, 4 sink and 64 local tokens; ignores the budget"
)
_OWN_TABLES = "magicpig with 150 tables of 10 bits, the default of its authors"
RIVALS = {
    "quest": Rival(_PAGES, _QUEST, _PAGE, _GROUP),
    "quest-heads": Rival("the same, one set per query head, as published", _QUEST, _PAGE, _HEADS),
    "quest-page4": Rival("quest with pages of 4", _QUEST, _SMALL, _GROUP),
    "quest-heads-page4": Rival("quest-heads with pages of 4", _QUEST, _SMALL, _HEADS),
    "magicpig": Rival(_TABLES, _MAGICPIG, _SPOTLIGHT, {"sink": 4, "local": 64}),
    "magicpig-sink": Rival("magicpig with its sink, no local tokens", _MAGICPIG, _SPOTLIGHT, {"sink": 4, "local": 0}),
    "magicpig-local": Rival("magicpig with its local, no sink tokens", _MAGICPIG, _SPOTLIGHT, {"sink": 0, "local": 64}),
    "magicpig-bare": Rival("the same without sink and local tokens", _MAGICPIG, _SPOTLIGHT, {"sink": 0, "local": 0}),
    "magicpig-10x150": Rival(_OWN_TABLES, _MAGICPIG, _AUTHORS, {"sink": 4, "local": 64}),
}
"""All rivals, in the order of `evals list`."""
