"""The captures of a run, made in waves: as many contexts at once as the disk has room for, from a few to all.

1. Held-out contexts, those of calibration, and the first ones of training, which starts read, are always stored.
2. A wave is a number of consecutive steps. Their contexts are captured, every layer trains these steps, and the
   captures make room for those of the next wave. If all contexts fit, there is one wave.
3. A training step reads all keys of a context and the queries of 64 rows, so of long contexts few queries are stored
   (`hashtrain.data.captured.Kept`): 5.6 TB instead of 26 for Llama-3-8B with the paper's schedule.

The number of waves changes no bit: between waves, a layer's training is in its checkpoint.
"""

import collections
import functools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hashtrain.config import ModelShape
from hashtrain.data.capture import context_bytes, context_key, run_context
from hashtrain.data.captured import ALL, KEY, STEPS, Capture, Kept
from hashtrain.data.offsets import places
from hashtrain.device import here
from hashtrain.files.atomic import save_tensors
from hashtrain.models import load_model
from hashtrain.run.recipes import Recipe
from hashtrain.run.settings import TrainCommand
from hashtrain.run.workers import run_jobs
from hashtrain.training.train_config import TrainConfig

_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Source:
    """Token contexts and the capture of their queries and keys, existing or to be made; step n reads context n % N."""

    name: str
    folder: Path
    contexts: Sequence[Tensor]
    first_contexts: int
    """Number of first contexts of which more is stored than a step of training reads."""
    shape: ModelShape
    weights: str
    """`hashtrain.data.capture.weights_hash` of the model."""
    device: str
    reach: int | None = None
    """Contexts are spread over positions 0 to reach - 1; None: all begin at 0."""
    torn: bool = False
    """Whether every second one is torn (`hashtrain.data.offsets`), as those of training are."""
    corpora: int = 1
    """How many corpora give contexts in turn."""
    first: Kept = ALL
    """What is stored of the first contexts."""

    def places(self, number: int) -> Tensor:
        """Return the position of each token of a context."""
        return places(number, len(self.contexts[number]), self.reach, self.torn, self.corpora)

    @property
    def stored(self) -> Capture:
        """The capture on disk."""
        return Capture(self.folder, len(self.contexts))

    def kept(self, number: int) -> Kept:
        """Return what is stored of a context."""
        return self.first if number < self.first_contexts else STEPS

    def key(self, number: int) -> str:
        """Return what identifies the capture of a context."""
        ids, where = self.contexts[number], self.places(number)
        return context_key(self.weights, ids, self.device[:4], self.kept(number), where)

    def bytes(self, numbers: Iterable[int]) -> int:
        """Return the bytes that captures of these contexts take."""
        kinds = collections.Counter((len(self.contexts[number]), self.kept(number)) for number in numbers)
        return sum(count * context_bytes(self.shape, tokens, _DTYPE, kept) for (tokens, kept), count in kinds.items())

    def stored_in(self, wave: range) -> list[int]:
        """Return the contexts that are stored during a wave of steps."""
        count = len(self.contexts)
        read = range(count) if len(wave) >= count else (step % count for step in wave)
        return sorted({*range(min(self.first_contexts, count)), *read})

    def lacking(self, numbers: Iterable[int]) -> list[int]:
        """Return those of these contexts that are not captured yet."""
        return [number for number in numbers if not self.stored.holds(number, self.key(number))]

    def drop(self, kept: Iterable[int]) -> None:
        """Remove the captures of all contexts but these."""
        names = {self.stored.file(number).name for number in kept}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in names:
                path.unlink()


def waves(train: Source, steps: int, always: int, room: int) -> list[range]:
    """Return the steps of each wave.

    Args:
        always: bytes that are stored all the time; room: bytes for all captures.
    Raises: OSError if there is no room for one context beside what is always stored.
    """
    others = range(train.first_contexts, len(train.contexts))
    if always + train.bytes(others) <= room:
        return [range(steps)]
    fitting = (room - always) // max(1, train.bytes(others[:1]))
    if fitting < 1:
        needed = (always + train.bytes(others[:1])) / 1e9
        raise OSError(
            f"not enough disk for captures in {train.folder.parent}: expected {needed:.2f} GB, got "
            f"{room / 1e9:.2f} GB; free some space or give more by --disk, or use shorter contexts or a smaller --reach"
        )
    return [range(start, min(start + fitting, steps)) for start in range(0, steps, fitting)]


@dataclass(frozen=True)
class _Job:
    """A context to capture; its arrays are numpy's, because torch would send tensors through shared memory."""

    model: str
    device: str
    ids: NDArray[np.int64]
    path: Path
    key: str
    name: str
    kept: Kept
    where: NDArray[np.int64]


@functools.lru_cache(maxsize=1)
def loaded(path: str, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, once per process, for capturing."""
    return load_model(path, None, device)


def make_all(
    model: str, lots: Sequence[tuple[Source, Sequence[int]]], workers: int, advance: Callable[[str, int], None]
) -> None:
    """Capture contexts: numbers of each source.

    On the CPU one thread runs each context, several of them in parallel, so the result does not depend on the number of
    processes, which share one copy of the model. On CUDA each process has its own device and its own copy.
    """
    jobs = [
        _Job(
            *(model, of.device, of.contexts[n].numpy(), of.stored.file(n)),
            *(of.key(n), of.name, of.kept(n), of.places(n).numpy()),
        )
        for of, numbers in lots
        for n in numbers
    ]
    given: Any = None
    before = torch.multiprocessing.get_sharing_strategy()
    if workers > 1 and len(jobs) > 1:
        if jobs[0].device == "cpu":
            given, _ = loaded(model, "cpu")
            size = sum(tensor.numel() * tensor.element_size() for tensor in given.state_dict().values())
            shared = Path("/dev/shm")
            if not shared.is_dir() or size > 0.9 * shutil.disk_usage(shared).free:
                given, workers = None, 1  # a copy for each process may not fit
            else:
                torch.multiprocessing.set_sharing_strategy("file_system")  # the default shares at most 252 tensors
                given.share_memory()
        else:
            loaded.cache_clear()  # each process loads its own
    try:
        run_jobs(_make, jobs, workers, advance, given=given)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def _make(job: _Job, report: Callable[[str, int], None], model: PreTrainedModel | None = None) -> None:
    own = model or loaded(job.model, str(here(job.device)))[0]
    ids, where = torch.from_numpy(job.ids), torch.from_numpy(job.where)
    tensors, header = run_context(own, ids, kept=job.kept, where=where)
    save_tensors(tensors, job.path, metadata={**header, KEY: job.key})
    report(f"capture {job.name} q and k", 1)


def held_out_rows(command: TrainCommand, contexts: int) -> Iterator[Tensor]:
    """Draw the rows to evaluate in each held-out context, the same for every hasher and layer: int64 [rows]."""
    generator = torch.Generator("cpu").manual_seed(command.seed)
    for _ in range(contexts):
        size = (command.held_out_rows,)
        yield torch.randint(command.context // 4, command.context, size, generator=generator, device="cpu")


def training_of(command: TrainCommand, recipe: Recipe, device: str) -> TrainConfig:
    """Return the training schedule of a recipe, with its learning rate."""
    names = ("fraction", "steps", "warmup", "rows", "seed")
    settings: dict[str, Any] = {name: getattr(command, name) for name in names}
    settings |= {"min_position": command.context // 16, "precision": "bf16" if device.startswith("cuda") else "fp32"}
    settings |= {**recipe.training, "learning_rate": command.learning_rate or recipe.learning_rate}
    return TrainConfig(**settings)
