"""Training without captures on disk: the model runs one context, every layer takes one step on it, and it is dropped.

For schedules that use each context once, such as the paper's: storing what is read once costs terabytes and saves
nothing. Ends with what a training on stored captures ends with, to the bit: whole checkpoints, which
`hashtrain.job.make` goes on from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor
from transformers import PreTrainedModel

from hashtrain.capture import run_context
from hashtrain.captured import Capture, InMemory
from hashtrain.checkpoint import Checkpoint
from hashtrain.job import LayerJob, Report, following, started
from hashtrain.reads import Reads
from hashtrain.trainer import Training
from hashtrain.workers import one_thread


class LiveCapture:
    """The keys of one context at a time, and the queries of one step's rows; reads like a `Capture` of all of them.

    They stay on the model's device, which trains, too: all layers of Llama-3-8B take 0.55 GB at 8,192 tokens.
    """

    def __init__(self, model: PreTrainedModel, contexts: Sequence[Tensor], reads: Reads):
        self.model: PreTrainedModel = model
        self.contexts: Sequence[Tensor] = contexts
        self.reads: Reads = reads
        self.current: int = -1
        self._held: InMemory | None = None

    def __len__(self) -> int:
        return len(self.contexts)

    def load(self, step: int) -> None:
        """Run the context of a step, and drop that of the step before."""
        self._held, self.current = None, step % len(self)
        kept = self.reads.at_step(step)
        self._held = InMemory(*run_context(self.model, self.contexts[self.current], kept=kept, place=lambda x: x))

    def keys(self, context: int, layer: int) -> tuple[Tensor, float]:
        """Return k and the logits' scaling, as `Capture.keys` does. Raises: LookupError for another context."""
        return self._of(context).keys(context, layer)

    def queries(self, context: int, layer: int, rows: Tensor | None = None) -> Tensor:
        """Return queries as `Capture.queries` does. Raises: LookupError for another context."""
        return self._of(context).queries(context, layer, rows)

    def _of(self, context: int) -> InMemory:
        if self._held is None or context != self.current:
            raise LookupError(f"context {context} is not in memory, but {self.current}")
        return self._held


def train_all(
    model: PreTrainedModel, contexts: Sequence[Tensor], jobs: Sequence[LayerJob], reads: Reads, report: Report
) -> None:
    """Train the layers of `jobs` side by side and leave each one's last state as its checkpoint.

    Layers that are finished are left alone, checkpoints are gone on from. One thread, as every capture and every
    training has, so that the bits are the same.

    Args:
        model: on the device that trains. contexts: int64 [T] each, read in turn; reads: what of them.
    """
    live, saved = LiveCapture(model, contexts, reads), time.monotonic()
    every = min((job.command.checkpoint_seconds for job in jobs), default=0.0)
    with one_thread():
        trainings = [
            _training(job, live, report) for job in jobs if job.candidate.trained and not job.finished.exists()
        ]
        for step in range(min((len(t.losses) for t, _ in trainings), default=0), jobs[0].command.steps if jobs else 0):
            due = [(training, hear) for training, hear in trainings if training.next_step == step]
            if not due:
                continue
            live.load(step)
            for training, hear in due:
                training.run(hear, until=step + 1)
            if time.monotonic() - saved >= every:  # all together, and not again until as long after they are written
                for training, _ in trainings:
                    training.save()
                saved = time.monotonic()
        for training, _ in trainings:
            training.save()


def _training(job: LayerJob, live: LiveCapture, report: Report) -> tuple[Training, Callable[[int, float], None]]:
    """Return a layer's training where it stands, and what hears of its steps."""
    hasher = started(job)
    checkpoint = Checkpoint(job.unfinished, math.inf)  # `train_all` says when
    training = Training(hasher, job.layer, cast(Capture, live), job.training, checkpoint)
    return training, following(job, training, report)
