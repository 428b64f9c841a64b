"""A run's working folder, `.work` below its --out: what an interrupted run leaves for the next one.

    .lock                         held by the run that works here
    .work/run.toml                the settings, for a reader
    .work/train, .work/held       captures (`hashtrain.manifest`)
    .work/layers/NAME-LAYER-KEY   checkpoints and finished layers; the key stands for all that decides their bits

The folder is removed when the run has stored its hashers.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from hashcore.atomic import sweep

from hashtrain.atomic import write_text


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Be the only run that works below `out`, which is made if missing.

    Raises: BlockingIOError with one sentence if another run is at work there. A killed run's lock ends with it.
    """
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".lock")
    try:
        lock.acquire(timeout=2)  # a killed run's last breath
    except Timeout:
        raise BlockingIOError(
            f"another run is at work in {out}: expected to be alone there; wait until it ends, or choose another --out"
        ) from None
    try:
        _sweep(out)
        yield
    finally:
        lock.release()


def begin(out: Path, settings: str, layer_files: set[str]) -> Path:
    """Make the working folder and return it; remove checkpoints and layers of other settings.

    Args:
        settings: the run's settings as text, for a reader.
        layer_files: the names in `layers/` that belong to this run.
    """
    work = out / ".work"
    (work / "layers").mkdir(parents=True, exist_ok=True)
    for path in (work / "layers").iterdir():
        if path.name not in layer_files:
            path.unlink()
    before = work / "run.toml"
    if not before.exists() or before.read_text(encoding="utf-8") != settings:  # nothing to go on from
        (out / "metrics.jsonl").unlink(missing_ok=True)
        shutil.rmtree(out / "tensorboard", ignore_errors=True)
    write_text(work / "run.toml", settings)
    return work


def end(out: Path) -> None:
    """Remove the working folder, at once as far as the next run is concerned."""
    gone = out / ".work-done"
    shutil.rmtree(gone, ignore_errors=True)
    (out / ".work").rename(gone)
    shutil.rmtree(gone)


def _sweep(out: Path) -> None:
    """Remove what kills have left half written or half removed, here, in the hashers' folders and in the captures."""
    shutil.rmtree(out / ".work-done", ignore_errors=True)
    for folder in (out, *out.glob("*"), *out.glob(".work/*")):
        if folder.is_dir():
            sweep(folder)
