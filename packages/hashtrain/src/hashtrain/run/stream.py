"""Training without captures on disk: the model runs one context, every layer takes one step on it, and it is dropped.

For schedules that use each context once, such as the paper's: storing what is read once takes terabytes and saves no
time. The result is bit-identical to training on stored captures: complete checkpoints, which `hashtrain.run.job.make`
resumes.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from hashtrain.data.capture import run_context
from hashtrain.data.captured import Capture, InMemory
from hashtrain.data.offsets import offset
from hashtrain.machine.workers import one_thread
from hashtrain.models import require_vocabulary
from hashtrain.run.job import LayerJob, Report, following, started
from hashtrain.run.reads import Reads
from hashtrain.training.checkpoint import Checkpoint
from hashtrain.training.trainer import Training


class LiveCapture(Capture):
    """The keys of one context at a time and the queries of one step's rows; reads like a `Capture` of all contexts.

    They stay on the model's device, where training runs: 0.55 GB for all layers of Llama-3-8B at 8,192 tokens.
    """

    def __init__(self, model: PreTrainedModel, contexts: Sequence[Tensor], reads: Reads, reach: int | None):
        super().__init__(Path(), 0)
        self.count: int = 0  # contexts that are known, so that `step % len(...)` is the current one
        self.model: PreTrainedModel = model
        self.contexts: Sequence[Tensor] = contexts
        self.reads: Reads = reads
        self.reach: int | None = reach
        self.current: int = -1
        self._held: InMemory | None = None

    def load(self, step: int) -> None:
        """Run the context of a step and drop the previous one."""
        self._held = None
        try:
            ids, self.current, self.count = self.contexts[step], step, step + 1
        except IndexError:  # fewer contexts than steps: they are used again
            self.count = len(self.contexts)
            self.current = step % self.count
            ids = self.contexts[self.current]
        require_vocabulary(self.model, ids)
        kept, first = self.reads.at_step(step), offset(self.current, len(ids), self.reach)
        self._held = InMemory(*run_context(self.model, ids, kept=kept, place=lambda x: x, first=first))

    def keys(self, context: int, layer: int) -> tuple[Tensor, float]:
        return self._of(context).keys(context, layer)

    def queries(self, context: int, layer: int, rows: Tensor | None = None) -> Tensor:
        return self._of(context).queries(context, layer, rows)

    def _of(self, context: int) -> InMemory:
        if self._held is None or context != self.current:
            raise LookupError(f"expected context {self.current}, which is in memory, got {context}")
        return self._held


def train_all(
    model: PreTrainedModel,
    contexts: Sequence[Tensor],
    jobs: Sequence[LayerJob],
    reads: Reads,
    report: Report,
    reach: int | None = None,
) -> None:
    """Train the layers of `jobs` in parallel and leave each one's final state as its checkpoint.

    Finished layers are skipped and checkpoints resumed. Everything runs on one thread, like every capture and every
    training, so the result is bit-identical.

    Args:
        model: on the training device; contexts: int64 [T] each, read in turn; reads: what to read of them; reach: they
            are spread over positions 0 to reach - 1; None: all begin at 0.
    """
    live, saved = LiveCapture(model, contexts, reads, reach), time.monotonic()
    every = min((job.command.checkpoint_seconds for job in jobs), default=0.0)
    with one_thread():
        trainings = [_training(job, live, report) for job in jobs if job.recipe.trained and not job.finished.exists()]
        for step in range(min((len(t.losses) for t, _ in trainings), default=0), jobs[0].command.steps if jobs else 0):
            due = [(training, on_step) for training, on_step in trainings if training.next_step == step]
            if not due:
                continue
            live.load(step)
            for training, on_step in due:
                training.run(on_step, until=step + 1)
            if time.monotonic() - saved >= every:  # save all together; the interval starts after they are written
                for training, _ in trainings:
                    training.save()
                saved = time.monotonic()
        for training, _ in trainings:
            training.save()


def _training(job: LayerJob, live: LiveCapture, report: Report) -> tuple[Training, Callable[[int, float], None]]:
    """Return a layer's training, resumed if possible, and the callback that reports its steps."""
    hasher = started(job)
    checkpoint = Checkpoint(job.unfinished, math.inf)  # `train_all` decides when to save
    training = Training(hasher, job.layer, live, job.training, checkpoint)
    return training, following(job, training, report)
