"""Checkpoints and finished layers: one safetensors file with the state as JSON in its header, replaced atomically."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hashtrain.files.atomic import save_tensors
from hashtrain.files.untrusted import open_tensors, parse_json

_STATE, _DIGEST = "state", "sha256"
_REMEDY = "delete it and rerun the command"


def steps_in(path: Path) -> int:
    """Return the steps that a checkpoint has; 0 if there is none. Raises: ValueError if it is damaged."""
    if not path.exists():
        return 0
    with open_tensors(path, _REMEDY) as file:
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
