"""Bit codes, weighted XNOR-popcount scores and exact top-k, for numpy arrays and torch tensors."""

from hashcore import reference
from hashcore.index import BitIndex
from hashcore.ops import group_planes, pack, planes, quantise, score, search, topk, unpack

__all__ = ["BitIndex", "group_planes", "pack", "planes", "quantise", "reference", "score", "search", "topk", "unpack"]
__version__ = "2.0.0"
