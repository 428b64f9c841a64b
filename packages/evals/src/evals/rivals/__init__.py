"""Rival selectors, reimplemented from their papers: each in one file, following `sparse_decode`'s Selector protocol;
and their table."""

from typing import TYPE_CHECKING

from hashtrain.lazy import export

if TYPE_CHECKING:
    from evals.rivals.magicpig import MagicPigSelector
    from evals.rivals.quest import QuestSelector
    from evals.rivals.table import RIVALS, Rival, rival_named

export(
    __name__,
    {"magicpig": ("MagicPigSelector",), "quest": ("QuestSelector",), "table": ("RIVALS", "Rival", "rival_named")},
)
__all__ = ["RIVALS", "MagicPigSelector", "QuestSelector", "Rival", "rival_named"]
