"""The contexts of a run and their captures; captures that are missing are made."""

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hashtrain.data.capture import capture_one
from hashtrain.data.captured import Capture, Kept
from hashtrain.data.manifest import begin, finish, missing
from hashtrain.data.offsets import offset
from hashtrain.machine.distribute import ALONE, Ranks
from hashtrain.machine.workers import run_jobs
from hashtrain.models import load_model
from hashtrain.run.reads import Reads


@dataclass(frozen=True)
class Source:
    """Token contexts and the capture of their queries and keys, existing or to be made."""

    name: str
    folder: Path
    contexts: Sequence[Tensor]
    identity: dict[str, Any]
    """`hashtrain.data.manifest.identity` of the expected capture."""
    reads: Reads
    """What the run reads of it."""
    reach: int | None = None
    """Contexts are spread over positions 0 to reach - 1; None: all begin at 0."""

    def first(self, number: int) -> int:
        """Return the position of the first token of a context."""
        return offset(number, len(self.contexts[number]), self.reach)

    @property
    def stored(self) -> Capture:
        """The capture on disk."""
        return Capture(self.folder, len(self.contexts))

    @functools.cached_property
    def lacking(self) -> list[int]:
        """Numbers of the contexts that are not completely captured yet."""
        return missing(self.stored, self.identity)


@dataclass(frozen=True)
class _Job:
    model: str
    device: str
    ids: Tensor
    path: Path
    name: str
    kept: Kept
    first: int
    memory: float | None = None


@functools.lru_cache(maxsize=1)
def loaded(
    path: str, device: str = "cpu", memory: float | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, once per process, for capturing; `memory` is that of `load_model`."""
    # Many CPUs lack bfloat16 arithmetic and would be ten times slower.
    return load_model(path, torch.float32 if device == "cpu" else None, device, memory)


def make_all(
    model: str,
    device: str,
    sources: Sequence[Source],
    workers: int,
    advance: Callable[[str, int], None],
    ranks: Ranks = ALONE,
    memory: float | None = None,
) -> None:
    """Capture every context that is not captured yet.

    On the CPU one thread runs each context, several of them in parallel, so the result does not depend on the number of
    processes.

    Args:
        workers: processes, which share one copy of the model; if shared memory is too small for it (or the model is
            loaded layer by layer), each has its own, and there are fewer if memory is too small.
        ranks: torchrun's processes, which share the contexts.
    """
    mine = ranks.shard([(source, number) for source in sources for number in source.lacking])
    if ranks.first:
        for source in sources:
            begin(source.stored, source.identity)
    ranks.barrier()
    jobs = [
        _Job(model, device, of.contexts[n], of.stored.file(n), of.name, of.reads.kept(n), of.first(n), memory)
        for of, n in mine
    ]
    if jobs:
        _capture(jobs, workers, advance)
    ranks.barrier()
    if ranks.first:
        for source in sources:
            finish(source.stored)
    ranks.barrier()


def _capture(jobs: Sequence[_Job], workers: int, advance: Callable[[str, int], None]) -> None:
    """Run the model over the contexts of jobs, which are all of one model. Workers share its weights if they can."""
    first = jobs[0]
    if first.device != "cpu" or workers == 1 or len(jobs) == 1:
        run_jobs(_make, jobs, 1 if first.device != "cpu" else workers, advance)
        return
    model, _ = loaded(first.model, first.device, first.memory)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    if first.memory is None and size < _shared_room():
        run_jobs(_make, jobs, workers, advance, given=model.share_memory())
        return
    copies = _fitting(int(first.memory * 1e9) if first.memory else size)
    advance(f"each of {copies} workers has its own copy of the model", 0)
    run_jobs(_make, jobs, max(1, min(workers, copies)), advance)


def _make(job: _Job, report: Callable[[str, int], None], model: PreTrainedModel | None = None) -> None:
    own = model or loaded(job.model, job.device, job.memory)[0]
    capture_one(own, job.ids, job.path, kept=job.kept, first=job.first)
    report(f"capture {job.name} q and k", 1)


def _shared_room() -> float:
    """Return how many bytes of shared memory may be used: nine tenths of what is free; 0 where that is not known."""
    folder = Path("/dev/shm")
    return 0.9 * shutil.disk_usage(folder).free if folder.is_dir() else 0.0


def _fitting(size: int) -> int:
    """Return how many copies of a model of this many bytes fit in half of the free memory."""
    if not hasattr(os, "sysconf") or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return 1
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (2 * size)
