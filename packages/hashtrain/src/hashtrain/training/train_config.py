"""The settings of one layer's training, and its random numbers, drawn on the host: all devices draw the same."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from hashtrain.config import RECENT, SINK
from hashtrain.training.loss import LOSSES


@dataclass(frozen=True)
class TrainConfig:
    """Training settings of one layer; the same for every layer and, except the learning rate, every variant."""

    fraction: float = 0.02
    """Share of the tokens in the target (eq. 7)."""
    steps: int = 800
    """Optimiser steps per layer; each reads one context."""
    rows: int = 64
    """Query rows per step."""
    precision: str = "fp32"
    """`bf16` computes the hash functions under autocast; weights, scores and moments stay float32."""
    max_top: int = 8
    """Target tokens drawn per row."""
    by_attention: bool = False
    """Whether target tokens are drawn in proportion to their attention; uniformly, as in the paper, if not."""
    max_rest: int = 512
    """Tokens outside the target drawn per step, shared by its rows."""
    min_position: int = 256
    """Rows before this position are not trained on: their targets have only a few tokens."""
    loss: str = "ranking"
    """`ranking` (eq. 10), or the paper's ablation (eq. 17): `reconstruction`, or `mse`."""
    learning_rate: float = 1e-3
    warmup: float = 0.02
    """Share of the steps during which the learning rate rises; after it, cosine decay to zero."""
    beta: float = 1.0
    alpha: float = 3.0
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    of: Literal["visible", "length"] = "visible"
    """What `fraction` is a share of: each row's visible tokens, or, as in the paper, the whole context."""
    sink: int = SINK
    recent: int = RECENT
    """Numbers of first and last tokens that every row reads and that are excluded from pairs; 0 and 0 in the paper."""

    def __post_init__(self) -> None:
        for name, holds, wanted in (
            ("fraction", 0 < self.fraction <= 1, "above 0 and at most 1"),
            ("loss", self.loss in LOSSES, f"one of {', '.join(LOSSES)}"),
            ("of", self.of in ("visible", "length"), "visible or length"),
            ("precision", self.precision in ("fp32", "bf16"), "fp32 or bf16"),
            ("learning_rate", self.learning_rate > 0, "above 0"),
            *((name, getattr(self, name) >= 1, "at least 1") for name in ("steps", "rows")),
            *((name, getattr(self, name) >= 1, "at least 1") for name in ("max_top", "max_rest")),
            *((name, getattr(self, name) >= 0, "0 or more") for name in ("sink", "recent", "min_position")),
        ):
            if not holds:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then cosine decay to zero."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))


def generator_of(seed: int, layer: int) -> torch.Generator:
    """Return the random generator of a layer's training."""
    return torch.Generator("cpu").manual_seed(seed * 1_000_003 + layer)
