"""Train one layer's hash functions on captured queries and keys (docs/algorithm.md, eq. 9 to 11, 17)."""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

import contextlib
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from hashtrain.data.captured import Capture
from hashtrain.device import to_device
from hashtrain.files.untrusted import one_line
from hashtrain.layers import LayerHasher
from hashtrain.training.checkpoint import load_stored, save_stored
from hashtrain.training.pairs import pair_loss
from hashtrain.training.target import Pairs, attention, preferences, sample_pairs
from hashtrain.training.train_config import TrainConfig, generator_of

DIVERGED = 4.0
"""A training has diverged if the mean loss of an interval is this many times that of the first interval."""
_INTERVALS, _SHORTEST, _ENOUGH = 40, 10, 64
_log = logging.getLogger(__name__)


def train_layer(
    hasher: LayerHasher,
    layer: int,
    data: Capture,
    config: TrainConfig,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    checkpoint: Path | None = None,
) -> list[float]:
    """Train one layer's hash functions in place. See `Training`, which also records why it stopped early.

    Returns: the loss of every step.
    """
    training = Training(hasher, layer, data, config, checkpoint)
    training.run(on_step)
    if training.stopped:
        _log.warning("layer %d %s", layer, training.stopped)
    return training.losses


def interval_of(steps: int, contexts: int) -> int:
    """Return the length of an interval: rounds of all contexts, because their losses differ by more than half.

    Means over `_ENOUGH` of many contexts differ little. Steps are judged four times at least, if they are not few.
    """
    least = max(_SHORTEST, steps // _INTERVALS)
    return max(_SHORTEST, min(-(-least // contexts) * contexts, max(least, _ENOUGH), steps // 4))


class Training:
    """The training of one layer's hash functions. It can be killed at any time and resumed to the same bits.

    Args:
        hasher: the layer's modules, trained in place; `hasher.target_heads` selects the kind of target.
        layer: its index in the model, to read from `data`.
        checkpoint: file of the state, saved from time to time; if it exists, it is resumed, to the same bits.
        seconds: shortest time between saves, and so the most work that a kill can lose; 0 saves after every step.
    Attributes:
        losses: the loss of every step so far.
        best: the weights of the interval with the lowest mean loss, at first the initial ones.
        stopped: why training stopped early, if the loss diverged; the hasher then holds its best weights.
    Raises: ValueError if the checkpoint is damaged.
    """

    def __init__(
        self,
        hasher: LayerHasher,
        layer: int,
        data: Capture,
        config: TrainConfig,
        checkpoint: Path | None = None,
        seconds: float = 30.0,
    ):
        self.hasher: LayerHasher = hasher
        self.layer: int = layer
        self.data: Capture = data
        self.config: TrainConfig = config
        self.checkpoint: Path | None = checkpoint
        self.seconds: float = seconds
        self._saved = time.monotonic()
        self.device: torch.device = next(hasher.parameters()).device
        self.generator: torch.Generator = generator_of(config.seed, layer)
        how: dict[str, Any] = {"lr": config.learning_rate, "betas": (0.9, 0.98), "weight_decay": config.weight_decay}
        self.optimizer: torch.optim.AdamW = torch.optim.AdamW(hasher.parameters(), **how)
        self.interval: int = interval_of(config.steps, len(data))
        self.losses: list[float] = []
        self.lowest: float = math.inf
        self.best: dict[str, Tensor] = _copied(hasher)
        self.stopped: str = ""
        self._resume()

    def _resume(self) -> None:
        """Continue from the checkpoint, if there is one. Raises: ValueError if it is of another training."""
        if self.checkpoint and (found := load_stored(self.checkpoint)):
            try:
                self._restore(*found)
            except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"{self.checkpoint} is not a checkpoint of this layer's training ({one_line(error)}); delete "
                    "it and rerun the command"
                ) from error

    def run(self, on_step: Callable[[int, float], None] = lambda step, loss: None, until: int | None = None) -> None:
        """Run the remaining steps, up to `until` or until the loss diverges. Calls `on_step(step, loss)` after each.

        Raises: FloatingPointError if the first loss is already not finite.
        """
        last = self.config.steps if until is None else min(until, self.config.steps)
        while not self.stopped and len(self.losses) < last:
            step = len(self.losses)
            loss = self._step(step)
            if math.isfinite(loss):
                self.losses.append(loss)
                on_step(step, loss)
                if len(self.losses) % self.interval == 0:
                    self._judge()
            elif step == 0:
                raise FloatingPointError(
                    f"layer {self.layer}: expected a finite loss at the first step, got {loss}; check the model's "
                    "queries and keys"
                )
            else:
                self.stopped = "its loss or its gradient became infinite or NaN"
            if self.stopped:
                self.hasher.load_state_dict(self.best)
                self.stopped = (
                    f"stopped at step {step} of {self.config.steps}: {self.stopped}; its best weights are kept"
                )
            if self.stopped or time.monotonic() - self._saved >= self.seconds:
                self.save()

    def _judge(self) -> None:
        """After an interval, keep its weights if they are the best; stop if the loss has diverged."""
        first, last = (
            math.fsum(x) / self.interval for x in (self.losses[: self.interval], self.losses[-self.interval :])
        )
        if last < self.lowest:
            self.lowest, self.best = last, _copied(self.hasher)
        if last > DIVERGED * first:
            self.stopped = f"its mean loss rose from {first:.3g} to {last:.3g}"

    @property
    def next_step(self) -> int | None:
        """The next step; None if training is finished."""
        return None if self.stopped or len(self.losses) >= self.config.steps else len(self.losses)

    def save(self) -> None:
        """Write the checkpoint now. Raises: OSError if it cannot be written; the old one is kept."""
        if self.checkpoint:
            save_stored(self.checkpoint, *self._state())
            self._saved = time.monotonic()

    def _step(self, step: int) -> float:
        """Run one step and return its loss; NaN, and nothing is changed, if it or the gradient is not finite."""
        config = self.config
        self.optimizer.param_groups[0]["lr"] = config.learning_rate_at(step)
        context = step % len(self.data)
        k, scaling = self.data.keys(context, self.layer)
        if k.shape[2] <= config.min_position:
            raise ValueError(
                f"contexts must be longer than min_position = {config.min_position}, got {k.shape[2]} tokens; capture "
                "longer ones, or lower min_position"
            )
        k = to_device(k, self.device)
        size, apart = (config.rows,), self.data.stride(context)
        positions = torch.randint(config.min_position, k.shape[2], size, generator=self.generator, device="cpu")
        positions = positions // apart * apart  # the nearest rows whose queries are stored
        q = to_device(self.data.queries(context, self.layer, positions), self.device)
        with torch.device(self.device) if self.device.type != "cpu" else contextlib.nullcontext():
            loss = self._gradients(q, k, positions, scaling)
        norm = torch.nn.utils.clip_grad_norm_(self.hasher.parameters(), config.clip)
        loss, norm = cast("list[float]", torch.stack([loss, norm]).tolist())  # the only wait for the device
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return math.nan
        self.optimizer.step()
        return loss

    def _gradients(self, q: Tensor, k: Tensor, positions: Tensor, scaling: float) -> Tensor:
        """Compute the gradients of the mean loss over all rows, and return that loss.

        The loss stays on the device; it is NaN if q or k is not finite.
        """
        self.optimizer.zero_grad()
        bad = ~torch.stack([*q.aminmax(), *k.aminmax()]).isfinite().all()  # NaN is both extremes
        loss = pair_loss(self.hasher, q, k, self._pairs(q, k, positions, scaling), scaling, self.config)
        loss.backward()
        return loss.detach().masked_fill(bad, math.nan)

    @torch.no_grad()
    def _pairs(self, q: Tensor, k: Tensor, positions: Tensor, scaling: float) -> Pairs:
        config = self.config
        order = attention if config.by_attention else preferences
        p = order(q, k, to_device(positions, k.device), scaling, self.hasher.target_heads)
        drawn = config.max_top, config.max_rest, self.generator
        ends = config.sink, config.recent
        return sample_pairs(p, positions, config.fraction, *drawn, config.of, ends, config.by_attention)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"hasher.{name}": tensor for name, tensor in self.hasher.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": tensor for name, tensor in moments.items()}
        tensors["generator"] = self.generator.get_state()
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        lowest = self.lowest if math.isfinite(self.lowest) else None
        return tensors, {"lowest": lowest, "stopped": self.stopped}

    def _restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _part(tensors, "optimizer").items():
            number, _, what = name.partition(".")
            moments.setdefault(int(number), {})[what] = tensor
        self.generator.set_state(tensors["generator"])
        self.hasher.load_state_dict(_part(tensors, "hasher"))
        self.best = _part(tensors, "best")
        self.lowest = math.inf if state["lowest"] is None else state["lowest"]
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        self.losses, self.stopped = tensors["losses"].tolist(), state["stopped"]


def _copied(module: nn.Module) -> dict[str, Tensor]:
    """Copy the weights of a module to the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}."): t for name, t in tensors.items() if name.startswith(f"{prefix}.")}
