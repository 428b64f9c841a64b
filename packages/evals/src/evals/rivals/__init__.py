"""Rival selectors, written from their papers: each in one file, all of `sparse_decode`'s Selector protocol; and their
table."""

from evals.rivals.magicpig import MagicPigSelector
from evals.rivals.quest import QuestSelector
from evals.rivals.table import RIVALS, Rival, rival_named

__all__ = ["RIVALS", "MagicPigSelector", "QuestSelector", "Rival", "rival_named"]
