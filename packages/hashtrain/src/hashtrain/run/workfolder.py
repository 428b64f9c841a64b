"""A run's working folder, `.work` below its --out: what an interrupted run leaves for the next one.

    .lock                         held by the running process
    .work/run.toml                the settings, for human readers
    .work/outputs.safetensors     the model's output projections
    .work/train, held, far        captures (`hashtrain.run.waves`)
    .work/layers/NAME-LAYER-KEY   checkpoints and finished layers; the key identifies everything that decides their bits

The folder is removed once the run has stored its hashers. Until then nothing in it can be mistaken: names or headers
hold digests, and what a killed run was writing is removed by the next write to its folder (`hashcore.atomic`).
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from hashtrain.files.atomic import write_text


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock `out` so that no other run works there; create it if missing.

    Raises: BlockingIOError with one sentence if another run is working there. A killed run releases its lock.
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(out / ".lock").acquire(timeout=2)  # allow a dying process to release it
    except Timeout:
        raise BlockingIOError(
            f"another run is working in {out}: expected no other; wait until it ends, or choose another --out"
        ) from None
    with held:
        yield


def begin(out: Path, settings: str) -> None:
    """Create the working folder. `settings` are the run's, as text for human readers."""
    work = out / ".work"
    (work / "layers").mkdir(parents=True, exist_ok=True)
    before = work / "run.toml"
    if not before.exists() or before.read_text(encoding="utf-8") != settings:  # nothing to resume
        (out / "metrics.jsonl").unlink(missing_ok=True)
    write_text(before, settings)


def end(out: Path) -> None:
    """Remove the working folder, first what says that there is something to resume."""
    (out / ".work" / "run.toml").unlink()
    shutil.rmtree(out / ".work")
