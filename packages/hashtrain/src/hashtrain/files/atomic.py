"""Atomic file writes: a kill leaves either the old file or the new one."""

from collections.abc import Callable
from pathlib import Path

from hashcore.atomic import replacing
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write(temporary)` and move the result to `path`; on any failure `path` keeps its old content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        write(temporary)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`, UTF-8."""
    replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Replace `path` by a safetensors file. Raises: OSError if it cannot be written."""
    try:
        replace(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"cannot write {path}: {error}") from error
