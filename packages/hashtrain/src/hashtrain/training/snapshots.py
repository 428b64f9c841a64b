"""Keep the weights of a training's best interval, in case its loss rises or diverges."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

DIVERGED = 4.0
"""A training has diverged if the mean loss of an interval is this many times that of the first interval."""
ROSE = 1.35
"""A loss has risen if the mean of an interval is this many times the lowest one. When queries begin to be trained, it
rises by up to 1.28 times and falls again in trainings that end well (demo model)."""
_INTERVALS, _SHORTEST = 40, 10


class Snapshots:
    """Keeps the weights of the interval with the lowest mean loss; before the first, the initial weights.

    Args:
        module: whose weights are kept.
        steps: of the whole training; an interval is a fortieth of them, at least 10.
    """

    def __init__(self, module: nn.Module, steps: int):
        self.module: nn.Module = module
        self.interval: int = max(_SHORTEST, steps // _INTERVALS)
        self.mean: float = math.inf
        self.tensors: dict[str, Tensor] = copied(module)

    def after(self, losses: Sequence[float]) -> str:
        """Check the losses at the end of each interval. Returns why to stop, or an empty string."""
        if not losses or len(losses) % self.interval:
            return ""
        first, last = self._mean(losses[: self.interval]), self._mean(losses[-self.interval :])
        if last < self.mean:
            self.mean, self.tensors = last, copied(self.module)
        if last > DIVERGED * first:
            return f"its mean loss rose from {first:.3g} to {last:.3g}"
        return ""

    def rose(self, losses: Sequence[float]) -> bool:
        """Whether the loss has risen, at the end of an interval; at other steps, False."""
        return not len(losses) % self.interval and self._mean(losses[-self.interval :]) > ROSE * self.mean

    def restore(self) -> None:
        """Load the kept weights into the module."""
        self.module.load_state_dict(self.tensors)

    def _mean(self, losses: Sequence[float]) -> float:
        return math.fsum(losses) / len(losses)


def copied(module: nn.Module) -> dict[str, Tensor]:
    """Copy the weights of a module to the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
