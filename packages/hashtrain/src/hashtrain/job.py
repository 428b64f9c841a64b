"""One layer of one hasher, from its random start to its figures on held-out text: what a worker does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from safetensors import torch as safe

from hashtrain.capture import Capture
from hashtrain.config import HasherConfig
from hashtrain.hasher import make_layer
from hashtrain.judge import judge_layer
from hashtrain.plan import Candidate, TrainCommand
from hashtrain.remainder import calibrate
from hashtrain.trainer import TrainConfig, train_layer


@dataclass(frozen=True)
class LayerJob:
    """What to make, and from what."""

    command: TrainCommand
    candidate: Candidate
    config: HasherConfig
    layer: int
    data: Capture
    held: Capture

    @property
    def training(self) -> TrainConfig:
        """The schedule, with the candidate's own learning rate."""
        return TrainConfig(
            fraction=self.command.fraction,
            steps=self.command.steps,
            loss=self.candidate.loss,
            learning_rate=self.candidate.learning_rate,
            min_position=self.command.context // 16,
            seed=self.command.seed,
        )


@dataclass(frozen=True)
class LayerResult:
    """The layer's tensors as safetensors bytes, the loss of every step, and `judge_layer`'s figures."""

    tensors: bytes
    losses: list[float]
    quality: dict[str, dict[str, Any]]


def make(job: LayerJob, report: Callable[[str, int], None]) -> LayerResult:
    """Train, calibrate and judge one layer. `report` gets (what, steps done)."""
    hasher, name = make_layer(job.config, job.layer, job.command.seed), f"{job.candidate.name}, layer {job.layer}"
    losses: list[float] = []
    if job.candidate.trained:
        losses = train_layer(
            hasher,
            job.layer,
            job.data,
            job.training,
            lambda step, loss: report(f"train {name}, loss {loss:.3f}", 1),
        )
    calibrate(hasher, job.layer, job.data, job.command.seed)
    quality = judge_layer(job.command, hasher, job.layer, job.held)
    report(f"judged {name}", 1)
    return LayerResult(safe.save(hasher.state_dict()), losses, quality)
