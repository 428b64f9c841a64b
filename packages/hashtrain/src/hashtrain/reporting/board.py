"""Write losses and evaluation results for TensorBoard, an optional dependency."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hashtrain.usage import UsageError


def require_board() -> None:
    """Raise UsageError if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "--tensorboard needs the package tensorboard, which is not installed: in the checkout "
            "`uv pip install './packages/hashtrain[tensorboard]'` or `uv sync --group tensorboard`"
        )


def open_board(folder: Path) -> Callable[[dict[str, Any]], None]:
    """Return a function that writes a line of metrics.jsonl as scalars: one chart per hasher, one curve per layer.

    A resumed run adds another event file.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def write(line: dict[str, Any]) -> None:
        at, layer = line["hasher"], line["layer"]
        if "loss" in line:
            writer.add_scalar(f"{at}/loss/{layer}", line["loss"], line["step"])
        for heads, iou in line.get("iou", {}).items():
            writer.add_scalar(f"{at}/iou/{heads}", iou, layer)
        if "stopped" in line:
            writer.add_text(f"{at}/stopped", f"layer {layer} {line['stopped']}")
        writer.flush()

    return write
