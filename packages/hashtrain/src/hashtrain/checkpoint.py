"""What an interrupted training goes on from: one safetensors file, its state as JSON in the header, replaced whole."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hashtrain.atomic import save_tensors

_STATE = "state"


class Checkpoint:
    """A file that is written at most once in so many seconds.

    Args:
        path: the file; its folder is made if missing.
        seconds: the least time between two writes, so the most work that a kill can cost; 0 writes after every step.
    """

    def __init__(self, path: Path, seconds: float = 30.0):
        self.path, self.seconds, self._last = path, seconds, time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the last write, or the start, is long enough ago."""
        return time.monotonic() - self._last >= self.seconds

    def save(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Replace the file. Raises: OSError if it cannot be written; the earlier one stays."""
        save_stored(self.path, tensors, state)
        self._last = time.monotonic()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read what was saved last, or None if nothing was. Raises: ValueError if the file is damaged."""
        return load_stored(self.path)

    def remove(self) -> None:
        """Forget what was saved."""
        self.path.unlink(missing_ok=True)


def save_stored(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Replace `path` by tensors and a JSON state. Raises: OSError if it cannot be written."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_tensors(plain, path, metadata={_STATE: json.dumps(state)})


def load_stored(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read the tensors and the state that `save_stored` wrote; None if there is no such file.

    Raises: ValueError with one sentence if the file is damaged, which no kill leaves behind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            return tensors, json.loads((file.metadata() or {})[_STATE])
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run the same command again") from error
