"""A run's working folder, `.work` below its --out: what an interrupted run leaves for the next one.

    .lock                         held by the running process
    .work/run.toml                the settings, for human readers
    .work/train, held, far        captures (`hashtrain.run.waves`)
    .work/layers/NAME-LAYER-KEY   checkpoints and finished layers; the key identifies everything that decides their bits

The folder is removed once the run has stored its hashers.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from hashcore.atomic import sweep

from hashtrain.files.atomic import write_text


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock `out` so that no other run works there; create it if missing.

    Raises: BlockingIOError with one sentence if another run is working there. A killed run releases its lock.
    """
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".lock")
    try:
        lock.acquire(timeout=2)  # allow a dying process to release it
    except Timeout:
        raise BlockingIOError(
            f"another run is working in {out}: expected no other; wait until it ends, or choose another --out"
        ) from None
    try:
        _sweep(out)
        yield
    except BaseException:
        _sweep(out)  # what workers were writing when they were terminated
        raise
    finally:
        lock.release()


def begin(out: Path, settings: str, layer_files: set[str]) -> None:
    """Create the working folder; remove checkpoints and layers of other settings.

    `settings` are the run's, as text for human readers, and `layer_files` names in `layers/` that belong to this run.
    """
    work = out / ".work"
    (work / "layers").mkdir(parents=True, exist_ok=True)
    for path in (work / "layers").iterdir():
        if path.name not in layer_files:
            path.unlink()
    before = work / "run.toml"
    if not before.exists() or before.read_text(encoding="utf-8") != settings:  # nothing to resume
        (out / "metrics.jsonl").unlink(missing_ok=True)
    write_text(work / "run.toml", settings)


def end(out: Path) -> None:
    """Remove the working folder; renamed first, so that the next run never sees a part of it."""
    gone = out / ".work-done"
    shutil.rmtree(gone, ignore_errors=True)
    (out / ".work").rename(gone)
    shutil.rmtree(gone)


def _sweep(out: Path) -> None:
    """Remove temporary files that killed runs left here, in the hashers' folders and in the captures."""
    shutil.rmtree(out / ".work-done", ignore_errors=True)
    for folder in (out, *out.glob("*"), *out.glob(".work/*")):
        if folder.is_dir():
            sweep(folder)
