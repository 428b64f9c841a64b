"""What a worker does: train one layer of one hasher, calibrate it, and evaluate it on held-out text."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hashtrain
from hashtrain.config import HasherConfig
from hashtrain.data.captured import Capture
from hashtrain.device import here
from hashtrain.evaluation.calibration import calibrate
from hashtrain.evaluation.metrics import layer_quality, summary
from hashtrain.files.untrusted import open_tensors
from hashtrain.hasher import make_layer
from hashtrain.layers import LayerHasher
from hashtrain.run.recipes import Recipe
from hashtrain.run.settings import TrainCommand
from hashtrain.run.waves import held_out_rows, training_of
from hashtrain.run.workers import Report
from hashtrain.training.checkpoint import load_stored, save_stored, steps_in
from hashtrain.training.choose import choose
from hashtrain.training.train_config import TrainConfig
from hashtrain.training.trainer import Training, interval_of


@dataclass(frozen=True)
class LayerJob:
    """One layer to train, and its inputs."""

    command: TrainCommand
    recipe: Recipe
    config: HasherConfig
    layer: int
    data: Capture
    validation: Capture
    source: str
    """A digest of the captured data; part of `key`, because it decides the result."""
    device: str = "cpu"
    far: Capture | None = None
    """The contexts of calibration; None: those of training."""
    until: int | None = None
    """Stop before this step, for a later wave to go on; None: train to the end, evaluate and store."""

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"{self.recipe.name}, layer {self.layer}"

    @property
    def line(self) -> dict[str, Any]:
        """How a line of metrics.jsonl begins."""
        return {"hasher": self.recipe.name, "layer": self.layer}

    @property
    def training(self) -> TrainConfig:
        """The schedule, with the recipe's learning rate."""
        return training_of(self.command, self.recipe, self.device)

    @property
    def key(self) -> str:
        """A digest of everything that decides the bits of this layer."""
        evaluated = {name: getattr(self.command, name) for name in ("fraction", "context", "held_out_rows", "seed")}
        decisive = {
            "candidate": asdict(self.recipe),
            "config": asdict(self.config),
            "training": asdict(self.training),
            "interval": interval_of(self.command.steps, len(self.data)),
            "judged": evaluated,
            "layer": self.layer,
            "device": torch.device(self.device).type,
            "source": self.source,
            "versions": [hashtrain.__version__, torch.__version__],
        }
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def finished(self) -> Path:
        """Path of the finished layer."""
        return self.command.out / ".work" / "layers" / f"{self.recipe.name}-{self.layer}-{self.key}.safetensors"

    @property
    def outputs(self) -> Path:
        """Path of the model's output projections (`hashtrain.data.capture.output_projections`)."""
        return self.command.out / ".work" / "outputs.safetensors"

    @property
    def unfinished(self) -> Path:
        """Path of its checkpoint."""
        return self.finished.with_suffix(".checkpoint")

    @property
    def steps_done(self) -> int:
        """Steps that need not be trained again: all of a finished layer's, else those of its checkpoint."""
        return self.command.steps if self.finished.exists() else steps_in(self.unfinished)


class LayerResult(NamedTuple):
    """A finished layer: its tensors, the loss of every step, and why training stopped early ("" if not)."""

    tensors: dict[str, Tensor]
    errors: Tensor
    """Of each KV head at each budget (`hashtrain.evaluation.calibration`)."""
    losses: list[float]
    stopped: str
    quality: dict[str, Any]
    """`hashtrain.evaluation.metrics.summary` on held-out rows."""


def make(job: LayerJob, report: Report) -> None:
    """Train one layer as far as `job` says; at the end calibrate, evaluate and store it.

    Raises: OSError if it cannot be written; FloatingPointError if its loss was never finite.
    """
    command, layer, device = job.command, job.layer, here(job.device)
    hasher, losses, stopped = _made(job, not job.unfinished.exists()), list[float](), ""
    if job.recipe.trained:
        saved = job.unfinished, command.checkpoint_seconds
        training = Training(hasher, layer, job.data, job.training, *saved)
        training.run(following(job, training, report), until=job.until)
        if training.next_step is not None:
            return training.save()
        losses, stopped = training.losses, training.stopped
        if stopped:
            report(f"{job.name} {stopped}", command.steps - len(losses), {**job.line, "stopped": stopped})
        with torch.device(device):
            heads = choose(hasher, _made(job), layer, job.data, command.fraction) if hasher.starts else []
        if heads:
            said = f"heads {', '.join(map(str, heads))} keep their start, which finds more"
            report(f"{job.name}: {said}", 0, {**job.line, "untrained": heads})
    with torch.device(device):
        hasher.round_matrices()  # before anything is measured
        errors = calibrate(hasher, layer, job.far or job.data, command.seed, _output(job, device))
        rows = held_out_rows(command, len(job.validation))
        quality = summary(layer_quality([hasher], layer, job.validation, rows, command.fraction)[0])
    tensors = {f"hasher.{key}": tensor for key, tensor in hasher.state_dict().items()}
    tensors |= {"losses": torch.tensor(losses, dtype=torch.float64), "errors": errors}
    save_stored(job.finished, tensors, {"stopped": stopped, "quality": quality})
    job.unfinished.unlink(missing_ok=True)
    report(f"evaluated {job.name}", 1, {**job.line, "iou": quality["iou"]})


def _made(job: LayerJob, started: bool = True) -> LayerHasher:
    """Create the layer's functions as before the first step; without the start, which a checkpoint contains, too."""
    made = make_layer(job.config, job.layer, job.command.seed).to(here(job.device))
    if started:
        made.start(job.data, job.layer, job.recipe.digits)
    return made


def _output(job: LayerJob, device: torch.device) -> Tensor | None:
    """Read the layer's output projection; None if the model has none with a usual name."""
    with open_tensors(job.outputs, "rerun the command") as file:
        name = str(job.layer)
        return file.get_tensor(name).to(device, torch.float32) if name in set(file.keys()) else None


def result(job: LayerJob) -> LayerResult:
    """Read what `make` stored. Raises: ValueError if it is missing or damaged."""
    stored = load_stored(job.finished)
    if stored is None:
        raise ValueError(f"{job.finished} is missing: expected a finished layer; rerun the command to train it")
    tensors, state = stored
    try:
        losses, errors = tensors.pop("losses").tolist(), tensors.pop("errors")
        plain = {name.removeprefix("hasher."): tensor for name, tensor in tensors.items()}
        return LayerResult(plain, errors, losses, state["stopped"], state["quality"])
    except KeyError as error:
        raise ValueError(f"{job.finished} lacks {error}; delete it and rerun the command") from error


def following(job: LayerJob, training: Training, report: Report) -> Callable[[int, float], None]:
    """Return a callback that reports every step and, after the first and at intervals, the mean loss."""
    interval = training.interval

    def on_step(step: int, loss: float) -> None:
        line = None
        if step == 0 or (step + 1) % interval == 0:  # the first, too, as a sign that training has begun
            recent = training.losses[-interval:]
            line = {**job.line, "step": step + 1, "loss": sum(recent) / len(recent)}
        report(f"train {job.name}, loss {loss:.3f}", 1, line)

    return on_step
