"""Captured contexts joined to longer ones: what is fitted to rows of one length alone does not hold at others.

A view is a context behind earlier ones, in the order of their positions, up to the reach. It begins with its own first
tokens, which its queries attend to as a text's first ones; those of the earlier contexts are left out. Its far tokens
are of other texts, which suffices for how much attention the tokens take that nobody selects (docs/log.md, 2026-11-28).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hashtrain.config import SINK
from hashtrain.data.captured import Capture
from hashtrain.data.offsets import offset


class View(NamedTuple):
    """A context, and those before it."""

    own: int
    earlier: tuple[int, ...] = ()


class Rows(NamedTuple):
    """Some rows of a view's own context: q [1, Hq, R, D], k [1, Hkv, T, D], v [1, Hkv, T, Dv], where they are in it,
    int64 [R], and the attention scaling."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    scaling: float


def views(count: int, tokens: int, reach: int | None) -> list[View]:
    """Return views of training contexts of so many tokens each: whole ones alone, behind half as many and as many
    earlier ones as fit into the reach; all contexts alone if no two fit."""
    if reach is None or reach < 2 * tokens:
        return [View(context) for context in range(count)]
    order = sorted(range(0, count, 2), key=lambda context: offset(context // 2, tokens, reach))  # the others are torn
    found: list[View] = []
    for at, own in enumerate(order):
        most = min(at, reach // tokens - 1)
        found += [View(own, tuple(order[at - n : at])) for n in sorted({0, most // 2, most})]
    return found


def read(data: Capture, view: View, layer: int, rows: Tensor) -> Rows:
    """Read rows, int64 [R], of a view's own context, and all that they see. Raises: as `Capture.read`."""
    (k, scaling), v = data.keys(view.own, layer), data.values(view.own, layer)
    k = _joined(k, [data.keys(context, layer)[0] for context in view.earlier])
    before = k.shape[2] - v.shape[2]
    v = _joined(v, [data.values(context, layer) for context in view.earlier])
    return Rows(data.queries(view.own, layer, rows), k, v, rows + before, scaling)


def _joined(own: Tensor, earlier: list[Tensor]) -> Tensor:
    return torch.cat([own[:, :, :SINK], *(x[:, :, SINK:] for x in earlier), own[:, :, SINK:]], 2)
