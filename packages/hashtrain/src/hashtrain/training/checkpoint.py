"""What a training falls back on: its checkpoint, and the weights of its best interval.

A checkpoint is one safetensors file with the state as JSON in its header, replaced atomically.
"""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hashtrain.files.atomic import save_tensors
from hashtrain.files.untrusted import open_tensors, parse_json

_STATE, _DIGEST = "state", "sha256"
_REMEDY = "delete it and rerun the command"
DIVERGED = 4.0
"""A training has diverged if the mean loss of an interval is this many times that of the first interval."""
ROSE = 1.35
"""A loss has risen if the mean of an interval is this many times the lowest one. When queries begin to be trained, it
rises by up to 1.28 times and falls again in trainings that end well (demo model)."""
_INTERVALS, _SHORTEST = 40, 10


class Checkpoint:
    """A checkpoint file that is written at most once per interval.

    Args:
        path: the file; its folder is created if missing.
        seconds: shortest time between writes, and so the most work that a kill can lose; 0 writes after every step.
    """

    def __init__(self, path: Path, seconds: float = 30.0):
        self.path: Path = path
        self.seconds: float = seconds
        self._last = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the interval since the last write, or since the start, is over."""
        return time.monotonic() - self._last >= self.seconds

    def save(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Replace the file. Raises: OSError if it cannot be written; the old one is kept."""
        save_stored(self.path, tensors, state)
        self._last = time.monotonic()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read the last checkpoint; None if there is none. Raises: ValueError if the file is damaged."""
        return load_stored(self.path)

    @property
    def steps(self) -> int:
        """Steps that the last checkpoint has; 0 if there is none. Raises: as `load`."""
        if not self.path.exists():
            return 0
        with open_tensors(self.path, _REMEDY) as file:
            return file.get_slice("losses").get_shape()[0]


def save_stored(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Replace `path` by tensors and a JSON state. Raises: OSError if it cannot be written."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(state)
    save_tensors(plain, path, metadata={_STATE: text, _DIGEST: _digest(plain, text)})


def load_stored(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read the tensors and the state that `save_stored` wrote; None if there is no such file.

    Raises: ValueError with one sentence if any bit of the file has changed; a kill cannot cause that.
    """
    try:
        with open_tensors(path, _REMEDY) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except FileNotFoundError:
        return None
    try:
        text = metadata[_STATE]
        if metadata[_DIGEST] != _digest(tensors, text):
            raise ValueError("its checksum does not match")
        state = parse_json(text, strict=False)
        if not isinstance(state, dict):
            raise ValueError(f"expected a JSON object as its state, got {type(state).__name__}")
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); {_REMEDY}") from error
    return tensors, state


def _digest(tensors: dict[str, Tensor], state: str) -> str:
    sha = hashlib.sha256(state.encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()


class Snapshots:
    """Keeps a module's weights of the interval with the lowest mean loss; before the first, the initial weights.

    An interval is a fortieth of the training's `steps`, at least 10.
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
        first, last = _mean(losses[: self.interval]), _mean(losses[-self.interval :])
        if last < self.mean:
            self.mean, self.tensors = last, copied(self.module)
        if last > DIVERGED * first:
            return f"its mean loss rose from {first:.3g} to {last:.3g}"
        return ""

    def rose(self, losses: Sequence[float]) -> bool:
        """Whether the loss has risen, at the end of an interval; at other steps, False."""
        return not len(losses) % self.interval and _mean(losses[-self.interval :]) > ROSE * self.mean

    def restore(self) -> None:
        """Load the kept weights into the module."""
        self.module.load_state_dict(self.tensors)


def copied(module: nn.Module) -> dict[str, Tensor]:
    """Copy the weights of a module to the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def _mean(losses: Sequence[float]) -> float:
    return math.fsum(losses) / len(losses)
