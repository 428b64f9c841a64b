"""Rival selectors, written from their papers: each in one file, all of `sparse_decode`'s Selector protocol."""

from evals.rivals.magicpig import MagicPigSelector
from evals.rivals.quest import QuestSelector

__all__ = ["MagicPigSelector", "QuestSelector"]
