"""Train one layer's hash functions on captured queries and keys (docs/algorithm.md, eq. 9 to 11, 17)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hashtrain.capture import Capture
from hashtrain.layers import LayerHasher
from hashtrain.loss import ranking_loss, reconstruction_loss
from hashtrain.target import Pairs, attention, sample_pairs


@dataclass(frozen=True)
class TrainConfig:
    """How one layer is trained; the same for every layer and, but for the learning rate, every variant."""

    fraction: float = 0.02
    """Share of the visible tokens that counts as the target set (eq. 7)."""
    steps: int = 800
    """Optimiser steps a layer; each reads one context."""
    rows: int = 64
    """Query rows a step."""
    max_top: int = 8
    """Target tokens drawn a row."""
    max_rest: int = 512
    """Other tokens drawn a step, shared by its rows."""
    min_position: int = 256
    """Rows before this position are not trained on: their target sets hold a handful of tokens."""
    loss: str = "ranking"
    """`ranking` (eq. 10), or `reconstruction` (eq. 17), the paper's ablation."""
    learning_rate: float = 1e-3
    warmup: float = 0.02
    """Share of the steps with a rising learning rate; after it, cosine to zero."""
    beta: float = 1.0
    alpha: float = 3.0
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, got {self.fraction}")
        for name in ("steps", "rows", "max_top", "max_rest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.loss not in ("ranking", "reconstruction"):
            raise ValueError(f"loss must be ranking or reconstruction, got {self.loss!r}")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then cosine to zero."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))


def train_layer(
    hasher: LayerHasher,
    layer: int,
    data: Capture,
    config: TrainConfig,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train one layer's hash functions in place.

    Args:
        hasher: the layer's modules; `hasher.target_heads` says which attention they are held against.
        layer: its index in the model, to read from `data`.
        on_step: called with (step, loss) after each step, for progress.
    Returns: the loss of every step.
    Raises: FloatingPointError if the loss stops being finite.
    """
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + layer)
    optimizer = torch.optim.AdamW(
        hasher.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=config.weight_decay
    )
    losses: list[float] = []
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        q, k, scaling = data.read(step % len(data), layer)
        positions = torch.randint(config.min_position, k.shape[2], (config.rows,), generator=generator)
        rows = q[:, :, positions]
        with torch.no_grad():
            p = attention(rows, k, positions, scaling, hasher.target_heads)
            pairs = sample_pairs(p, positions, config.fraction, config.max_top, config.max_rest, generator)
        loss = _loss(hasher, rows, k, pairs, config)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"layer {layer}: the loss became {loss.item()} at step {step}; lower the learning rate"
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(hasher.parameters(), config.clip)
        optimizer.step()
        losses.append(loss.item())
        on_step(step, losses[-1])
    return losses


def _loss(hasher: LayerHasher, q: Tensor, k: Tensor, pairs: Pairs, config: TrainConfig) -> Tensor:
    top, rest = pair_scores(hasher, q, k, pairs)
    if config.loss == "ranking":
        return ranking_loss(top, rest, pairs.valid, config.beta, config.alpha)
    heads, valid = top.shape[1], torch.cat([torch.ones_like(top, dtype=torch.bool), pairs.valid], -1)
    exact = (hasher.by_group(q.float()).sum(2) if heads == hasher.hkv else q.float()) @ k.float().repeat_interleave(
        heads // hasher.hkv, 1
    ).mT
    at = torch.cat([pairs.top, pairs.rest.expand(*pairs.valid.shape)], -1)
    return reconstruction_loss(torch.cat([top, rest], -1), exact.gather(-1, at), valid)


def pair_scores(hasher: LayerHasher, q: Tensor, k: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Score the sampled tokens only: their keys are hashed, not the whole context's.

    Args:
        q: queries of the rows, [B, Hq, R, D]; k: all keys, [B, Hkv, T, D].
    Returns: scores of `pairs.top` [B, H, R, A] and of `pairs.rest` [B, H, R, C], with a slope, in units of +-bits.
    """
    batch, heads, rows, drawn = pairs.top.shape
    k = k.repeat_interleave(heads // k.shape[1], 1)  # the target's heads share keys within a group
    index = pairs.top.reshape(batch, heads, -1, 1).expand(-1, -1, -1, k.shape[-1])
    queries = hasher.soft_queries(q)
    top = hasher.soft_keys(k.gather(2, index)).view(batch, heads, rows, drawn, -1)
    rest = hasher.soft_keys(k[:, :, pairs.rest])
    return (top @ queries[..., None]).squeeze(-1), queries @ rest.transpose(-1, -2)
