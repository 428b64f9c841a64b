"""The captures of a run, made in waves: as many contexts at once as the disk has room for, from a few to all.

1. Held-out contexts, and the first training contexts, which starts and calibration read, are stored all the time.
2. A wave is a number of consecutive steps. Their contexts are captured, every layer trains these steps, and the
   captures make room for those of the next wave. If all contexts fit, there is one wave.
3. A training step reads all keys of a context and the queries of about 64 rows. The rows follow from the seed and the
   schedule (`hashtrain.training.train_config`), so no other queries are stored: 4.8 TB instead of 26 for Llama-3-8B
   with the paper's schedule.

The number of waves changes no bit: between waves, a layer's training is in its checkpoint.
"""

import functools
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hashtrain.config import ModelShape
from hashtrain.data.capture import capture_one, context_bytes, context_key
from hashtrain.data.captured import EVERYTHING, Capture, Kept
from hashtrain.data.offsets import offset
from hashtrain.device import here
from hashtrain.layers import BY_VARIANT
from hashtrain.models import load_model
from hashtrain.run.recipes import Recipe
from hashtrain.run.settings import TrainCommand
from hashtrain.run.workers import run_jobs
from hashtrain.training.train_config import TrainConfig, rows_of_steps

_DTYPE = torch.bfloat16
_DECISIVE = ("steps", "rows", "max_top", "max_rest", "min_position", "seed")
"""Settings of a training that decide which rows it draws."""


@dataclass(frozen=True)
class Reads:
    """What is read of each of `contexts` contexts of `tokens` tokens; step n reads context n % contexts."""

    shape: ModelShape
    tokens: int
    contexts: int
    whole: int
    """Number of first contexts that are stored whole."""
    steps: int = 0
    rows: int = 0
    """Most rows drawn in one step."""
    draw: Callable[[int], Tensor] | None = None
    """Returns the rows of each step in a layer, int32 [steps, rows]."""

    def kept(self, context: int) -> Kept:
        """Return what is stored of a context."""
        if context < self.whole:
            return EVERYTHING
        return Kept(tuple(rows[context :: self.contexts].unique() for rows in self._by_layer), values=False)

    def stored_in(self, wave: range) -> list[int]:
        """Return the contexts that are stored during a wave of steps (`hashtrain.run.waves`)."""
        read = range(self.contexts) if len(wave) >= self.contexts else (step % self.contexts for step in wave)
        return sorted({*range(min(self.whole, self.contexts)), *read})

    def bytes(self, contexts: Iterable[int]) -> int:
        """Return an upper bound of the bytes that captures of these contexts take: rows drawn twice are stored once."""
        drawn = math.ceil(self.steps / self.contexts) * self.rows
        few = context_bytes(self.shape, self.tokens, _DTYPE, drawn, values=False)
        every = context_bytes(self.shape, self.tokens, _DTYPE)
        return sum(every if context < self.whole else few for context in contexts)

    @cached_property
    def _by_layer(self) -> list[Tensor]:
        return [self.draw(layer) for layer in range(self.shape.num_layers)] if self.draw else []


@dataclass(frozen=True)
class Source:
    """Token contexts and the capture of their queries and keys, existing or to be made."""

    name: str
    folder: Path
    contexts: Sequence[Tensor]
    reads: Reads
    """What the run reads of it."""
    weights: str
    """`hashtrain.data.capture.weights_hash` of the model."""
    device: str
    reach: int | None = None
    """Contexts are spread over positions 0 to reach - 1; None: all begin at 0."""

    def first(self, number: int) -> int:
        """Return the position of the first token of a context."""
        return offset(number, len(self.contexts[number]), self.reach)

    @property
    def stored(self) -> Capture:
        """The capture on disk."""
        return Capture(self.folder, len(self.contexts))

    def key(self, number: int) -> str:
        """Return what identifies the capture of a context."""
        kept = self.reads.kept(number)
        return context_key(self.weights, self.contexts[number], self.device[:4], kept=kept, first=self.first(number))

    def lacking(self, numbers: Iterable[int]) -> list[int]:
        """Return those of these contexts that are not captured yet."""
        return [number for number in numbers if not self.stored.holds(number, self.key(number))]

    def drop(self, kept: Iterable[int]) -> None:
        """Remove the captures of all contexts but these."""
        names = {self.stored.file(number).name for number in kept}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in names:
                path.unlink()


def waves(train: Reads, always: int, room: int) -> list[range]:
    """Return the steps of each wave.

    Args:
        always: bytes that are stored all the time; room: bytes for all captures.
    Raises: OSError if there is no room for one context beside what is always stored.
    """
    others = range(train.whole, train.contexts)
    if always + train.bytes(others) <= room:
        return [range(train.steps)]
    fitting = (room - always) // max(1, train.bytes(others[:1]))
    if fitting < 1:
        needed = (always + train.bytes(others[:1])) / 1e9
        raise OSError(
            f"not enough free disk for captures: expected {needed:.2f} GB, got {room / 1e9:.2f} GB; free some space, "
            "or use fewer or shorter held-out contexts"
        )
    return [range(start, min(start + fitting, train.steps)) for start in range(0, train.steps, fitting)]


@dataclass(frozen=True)
class _Job:
    model: str
    device: str
    ids: Tensor
    path: Path
    key: str
    name: str
    kept: Kept
    first: int


@functools.lru_cache(maxsize=1)
def loaded(path: str, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, once per process, for capturing."""
    # Many CPUs lack bfloat16 arithmetic and would be ten times slower.
    return load_model(path, torch.float32 if device == "cpu" else None, device)


def make_all(
    model: str, lots: Sequence[tuple[Source, Sequence[int]]], workers: int, advance: Callable[[str, int], None]
) -> None:
    """Capture contexts: numbers of each source.

    On the CPU one thread runs each context, several of them in parallel, so the result does not depend on the number of
    processes, which share one copy of the model. On CUDA each process has its own device and its own copy.
    """
    jobs = [
        _Job(model, of.device, of.contexts[n], of.stored.file(n), of.key(n), of.name, of.reads.kept(n), of.first(n))
        for of, numbers in lots
        for n in numbers
    ]
    given: Any = None
    if jobs and workers > 1 and len(jobs) > 1:
        if jobs[0].device == "cpu":
            given, _ = loaded(model)
            size = sum(tensor.numel() * tensor.element_size() for tensor in given.state_dict().values())
            shared = Path("/dev/shm")
            if not shared.is_dir() or size > 0.9 * shutil.disk_usage(shared).free:
                given, workers = None, 1  # a copy for each process may not fit
            else:
                given.share_memory()
        else:
            loaded.cache_clear()  # each process loads its own
    run_jobs(_make, jobs, workers, advance, given=given)


def _make(job: _Job, report: Callable[[str, int], None], model: PreTrainedModel | None = None) -> None:
    own = model or loaded(job.model, str(here(job.device)))[0]
    capture_one(own, job.ids, job.path, job.key, kept=job.kept, first=job.first)
    report(f"capture {job.name} q and k", 1)


def training_reads(command: TrainCommand, shape: ModelShape, contexts: int, whole: int) -> Reads:
    """Return what training all hashers of a command reads of its `contexts` contexts.

    Starts, the choice of weights and calibration read the first `whole` ones.
    """
    trained = [recipe for recipe in command.recipes if recipe.trained]
    trainings = [(training_of(command, one, "cpu"), BY_VARIANT[one.variant].target_heads) for one in trained]

    def schedules(layer: int) -> dict[tuple[int, ...], TrainConfig]:
        """Hashers with the same schedule and the same number of target heads draw the same rows."""
        heads_of = {"kv": shape.at(layer).num_kv_heads, "query": shape.at(layer).num_query_heads}
        return {(heads_of[of], *(getattr(config, name) for name in _DECISIVE)): config for config, of in trainings}

    def draw(layer: int) -> Tensor:
        found = [torch.empty(command.steps, 0, dtype=torch.int32)]
        found += [rows_of_steps(config, layer, key[0], command.context) for key, config in schedules(layer).items()]
        return torch.cat(found, 1)

    most = max(len(schedules(layer)) for layer in range(shape.num_layers))
    return Reads(shape, command.context, contexts, whole, command.steps, command.rows * most, draw)


def held_out_rows(command: TrainCommand, contexts: int) -> Iterator[Tensor]:
    """Draw the rows to evaluate in each held-out context, the same for every hasher and layer: int64 [rows]."""
    generator = torch.Generator("cpu").manual_seed(command.seed)
    for _ in range(contexts):
        size = (command.held_out_rows,)
        yield torch.randint(command.first_row, command.context, size, generator=generator, device="cpu")


def training_of(command: TrainCommand, recipe: Recipe, device: str) -> TrainConfig:
    """Return the training schedule of a recipe, with its learning rate."""
    names = ("fraction", "steps", "warmup", "rows", "seed")
    settings: dict[str, Any] = {name: getattr(command, name) for name in names}
    settings |= {"min_position": command.context // 16, "precision": "bf16" if device.startswith("cuda") else "fp32"}
    settings |= {**recipe.training, "learning_rate": command.learning_rate or recipe.learning_rate}
    return TrainConfig(**settings)
