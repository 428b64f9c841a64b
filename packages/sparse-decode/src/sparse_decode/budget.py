"""The budget: how many tokens each row reads; and the tally of tokens read so far."""

import math
import os
from dataclasses import dataclass, fields
from threading import Lock
from typing import Any, cast

import torch
from hashtrain import top_count
from hashtrain.config import RECENT, SINK, are_shares
from torch import Tensor

from sparse_decode.modes import in_graph, ordinary_tensors

_LOCK = Lock()  # of all tallies; held for microseconds
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


@dataclass(frozen=True)
class Budget:
    """The number of tokens that a row reads, out of its visible tokens (padding is not visible).

    The first `sink` and the last `recent` of them are always read and count within the budget; the others are selected.
    `attach` divides a budget among layers and KV heads, at the same mean, if the hasher has shares for them (eq. 22 and
    23); `min_tokens`, `max_tokens`, `sink` and `recent` hold for each head.

    Source: docs/algorithm.md, eq. 7 and 8.
    """

    fraction: float = 0.02
    """Share of the row's visible tokens to read, above 0 and at most 1."""
    min_tokens: int = 1
    """Read at least this many, or all visible tokens if they are fewer."""
    max_tokens: int | None = None
    """Read at most this many, but never fewer than `sink + recent`."""
    sink: int = SINK
    """Always read this many of the first visible tokens; heads often attend strongly to the very first."""
    recent: int = RECENT
    """Always read this many of the last visible tokens; the last one is the row's own token."""

    def __post_init__(self) -> None:
        value: object = self.fraction
        if not isinstance(value, int | float) or not 0 < value <= 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"fraction must be above 0 and at most 1, got {value!r}; 0.02 keeps 2 %")
        for name, least in (("min_tokens", 1), ("sink", 0), ("recent", 0)):
            given = getattr(self, name)
            if not _is_int(given) or given < least:
                raise ValueError(f"{name} must be an integer of {least} or more, got {given!r}")
        if self.max_tokens is not None and not (_is_int(self.max_tokens) and self.max_tokens >= self.min_tokens):
            raise ValueError(
                f"max_tokens must be None or an integer of at least min_tokens = {self.min_tokens}, "
                f"got {self.max_tokens!r}"
            )


@dataclass(frozen=True)
class LayerBudget(Budget):
    """The budget of one sparse layer. Evaluations give one to `attach`, which then takes it as it is in every layer."""

    by_head: tuple[float, ...] = ()
    """Multiply `fraction` in each KV head, or query head with codes per query head, by its share; empty: by 1."""
    dense_below: int = 0
    """A row with fewer visible tokens than this attends to all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_int(self.dense_below) or self.dense_below < 0:
            raise ValueError(f"dense_below must be an integer of 0 or more, got {self.dense_below!r}")
        shares = cast(object, self.by_head)  # user input of any type
        if shares and not (isinstance(shares, tuple) and are_shares(cast(object, shares))):
            raise ValueError(f"by_head must be a tuple of numbers above 0, got {self.by_head!r}")

    @classmethod
    def like(cls, budget: Budget, **more: Any) -> "LayerBudget":
        """Return a budget with the fields of another one, and `more`."""
        return cls(**{field.name: getattr(budget, field.name) for field in fields(budget)} | more)

    def count(self, visible: Tensor) -> Tensor:
        """Return the number of tokens each row reads, including sink and recent; all below `dense_below`.

        Args: visible: visible tokens of each row, integers [..., Q].
        Returns: int64 [..., Q], in [0, visible]; with shares by head [..., H, Q].
        """
        limits = self.min_tokens, self.max_tokens
        if self.by_head:
            parts = [min(1.0, self.fraction * share) for share in self.by_head]
            counts = torch.stack([top_count(visible, part, *limits) for part in parts], -2)
            visible = visible[..., None, :]
        else:
            counts = top_count(visible, self.fraction, *limits)
        counts = counts.maximum(visible.long().clamp(max=self.sink + self.recent))
        return torch.where(visible < self.dense_below, visible.long(), counts) if self.dense_below else counts

    def count_heads(self, visible: int) -> list[int]:
        """Return `count` for an integer: one number if all heads read as many, else one for each share."""
        shares = self.by_head or (1.0,)
        if visible < self.dense_below:
            return [visible] * len(shares)
        found: list[int] = []
        for share in shares:
            count = max(self.min_tokens, math.floor(visible * min(1.0, self.fraction * share) + 1e-9))  # as top_count
            count = count if self.max_tokens is None else min(count, self.max_tokens)
            found.append(min(visible, max(count, self.sink + self.recent)))
        return found

    @property
    def mean_fraction(self) -> float:
        """The mean of `fraction` over KV heads, for predictions."""
        shares = self.by_head or (1.0,)
        return sum(min(1.0, self.fraction * share) for share in shares) / len(shares)

    def most(self, n: int) -> int:
        """Return the maximal number of tokens that a row with at most `n` visible tokens reads."""
        below = min(n, self.dense_below - 1) if self.dense_below else 0
        return max(below, *self.count_heads(n))


class Tally:
    """Tokens selected and visible so far, summed over sparse rows and query heads.

    Counts known to the host are Python integers; those on a device are in `tensor` there, int64 [2], and the host waits
    for them only in `totals`. A captured step adds to them when it is replayed. Steps on several streams of a device at
    once may lose counts.
    """

    def __init__(self, device: torch.device | None = None):
        with ordinary_tensors():  # it outlives torch modes of this call
            self.tensor: Tensor = torch.zeros(2, dtype=torch.int64, device=device)
        self._selected = self._visible = 0

    def totals(self) -> tuple[int, int]:
        """Return tokens selected and visible so far."""
        with _LOCK:
            selected, visible = cast(list[int], self.tensor.tolist())  # pyright: ignore[reportUnknownMemberType]
            return selected + self._selected, visible + self._visible

    def reset(self) -> None:
        """Reset the counts to zero."""
        with _LOCK:
            self.tensor.zero_()
            self._selected = self._visible = 0

    def add(self, selected: int, visible: int) -> None:
        """Add counts known to the host."""
        with _LOCK:
            self._selected += selected
            self._visible += visible

    def add_step(self, counts: Tensor, heads: int) -> None:
        """Add what a step selected and saw for each query head, int64 [2], on a device."""
        if in_graph(counts.device):
            self.tensor.add_(counts, alpha=heads)
            return
        with _LOCK:
            if self.tensor.device != counts.device:
                with ordinary_tensors():
                    self.tensor = self.tensor.to(counts.device)
            self.tensor.add_(counts, alpha=heads)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
