"""The cost of a training, computed from a model's config alone: no weights, no text, nothing written.

`--dry-run` runs one context and a few steps on this machine. This module counts bytes and operations instead, for
machines that are not at hand, such as a GPU that runs the paper's schedule for Llama-3-8B.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hashtrain.config import ModelShape
from hashtrain.evaluation.remainder import MAX_CONTEXTS
from hashtrain.layers import shapes
from hashtrain.models import count_parameters
from hashtrain.run.estimate import clock, step_bytes, together, traffic, weight_bytes
from hashtrain.run.job import training_of
from hashtrain.run.pipeline import config_of
from hashtrain.run.reads import training_reads, validation_reads
from hashtrain.settings.train_command import TrainCommand

USED = 0.4
"""Share of a device's peak arithmetic and bandwidth that large operations reach."""
_LAUNCH = 6e-6  # seconds
_LAUNCHES = 150  # per training step of one layer


class Device(NamedTuple):
    """A GPU: bf16 operations per second, bytes of memory traffic per second and bytes of memory, per its data sheet."""

    flops: float
    bandwidth: float
    memory: float


DEVICES = {
    "A100-80GB": Device(312e12, 2.04e12, 80e9),
    "H100-80GB": Device(989e12, 3.35e12, 80e9),
    "L40S-48GB": Device(362e12, 0.86e12, 48e9),
    "RTX4090-24GB": Device(165e12, 1.01e12, 24e9),
    "A4000-16GB": Device(77e12, 0.45e12, 16e9),
}


@dataclass(frozen=True)
class Schedule:
    """Bytes and operations of a whole training, and a lower bound of its hours on one GPU of each kind."""

    parameters: int
    model_memory: int
    """Bytes of the weights in bfloat16."""
    disk: int
    """Bytes of all captures, without file headers; an upper bound, because rows drawn twice are stored once."""
    streamed_disk: int
    """The same with --stream."""
    step_memory: int
    """Bytes to train the largest layer; streamed_memory: all layers in parallel, without the model (--stream)."""
    streamed_memory: int
    traffic: int
    """Bytes read from the captures by all steps."""
    capture_flops: float
    train_flops: float
    waves: int
    """Number of parts in which the captures must be made and used to fit --disk; with --stream, a part is a step."""
    hours: dict[str, list[float]] = field(default_factory=dict)
    """By GPU: hours of capture and of training."""

    def lines(self, command: TrainCommand) -> list[str]:
        """Format the schedule as lines of text."""
        names = ", ".join(recipe.name for recipe in command.recipes)
        said = [
            f"hashers              {names}",
            f"schedule             {command.steps} steps of {command.rows} rows, {command.contexts} contexts of "
            f"{command.context} tokens",
            f"weights, bfloat16    {self.model_memory:,} bytes of {self.parameters:,} parameters",
            f"disk                 {self.disk:,} bytes; with --stream {self.streamed_disk:,}",
            f"waves                {self.waves} for the disk given; with --stream a step each",
            f"memory to train      {self.step_memory:,} bytes a layer; with --stream {self.streamed_memory:,} for all",
            f"read to train        {self.traffic:,} bytes",
            "least time, one GPU  to capture, to train, both, disks not counted; and whether --stream fits",
        ]
        for name, (capture, train) in self.hours.items():
            fits = "fits" if self.model_memory + self.streamed_memory < DEVICES[name].memory else "--backbone-memory"
            times = ", ".join(clock(3600 * hours) for hours in (capture, train, capture + train))
            said.append(f"  {name:18} {times}; {fits}")
        return said


def schedule(command: TrainCommand, model_config: Any, disk: float | None = None) -> Schedule:
    """Compute the cost of a command for a model with this Hugging Face config.

    Args:
        disk: bytes available for captures, which decide the number of waves; None: no limit.
    Raises: ValueError if the model has no heads to hash, or `disk` is too small for what every wave needs.
    """
    shape = ModelShape.of(model_config)
    reads = training_reads(command, shape, command.contexts, MAX_CONTEXTS, shared=False)
    validation = validation_reads(command, shape, command.held_out).bytes(range(command.held_out))
    first = min(MAX_CONTEXTS, command.contexts)
    always = validation + reads.bytes(range(first))  # read by starts, calibration and evaluation
    whole = validation + reads.bytes(range(command.contexts))
    (steps, train), read = _steps(command, shape), traffic(command, shape)
    parameters = count_parameters(model_config)
    width = sum(at.num_query_heads * at.head_dim for at in map(shape.at, range(shape.num_layers)))
    contexts = command.contexts + command.held_out
    capture = contexts * (2.0 * parameters * command.context + 2.0 * command.context**2 * width)
    launches = command.steps * len(steps) * _LAUNCHES * _LAUNCH
    hours = {
        name: [
            max(capture / (USED * device.flops), contexts * 2.0 * parameters / (USED * device.bandwidth)) / 3600,
            (max(train / (USED * device.flops), 3.0 * read / (USED * device.bandwidth)) + launches) / 3600,
        ]
        for name, device in DEVICES.items()
    }
    memory = max((step for step, _ in steps), default=0), together(steps) + reads.step_bytes
    waves = _waves(whole - always, always, disk)
    return Schedule(parameters, 2 * parameters, whole, always, *memory, read, capture, train, waves, hours)


def _steps(command: TrainCommand, shape: ModelShape) -> tuple[list[tuple[int, int]], float]:
    """Return the bytes of a step and of weights of each trained layer and hasher, and the operations of all steps."""
    steps: list[tuple[int, int]] = []
    train = 0.0
    for recipe in (c for c in command.recipes if c.trained):
        training = training_of(command, recipe, "cuda")
        for layer in range(shape.num_layers):
            config = config_of(command, recipe, shape, {}).at(layer)
            steps.append((step_bytes(config, training, command.context), weight_bytes(config)))
            sizes = [size for name, size in shapes(config).items() if name != "remainder"]
            weights = sum(math.prod(size[1:]) for size in sizes)  # per head
            hashed = training.rows * (1 + training.max_top) + training.max_rest
            heads = config.shape.num_query_heads
            logits = 2.0 * training.rows * command.context * config.shape.head_dim * heads
            train += command.steps * (logits + 6.0 * heads * hashed * weights)
    return steps, train


def _waves(other: int, always: int, disk: float | None) -> int:
    """Return the number of waves for `other` bytes, given the bytes that are always on disk."""
    if disk is None:
        return 1
    if disk <= always:
        raise ValueError(
            f"--disk must be above the {always / 1e9:.2f} GB that are always stored, got {disk / 1e9:.2f} GB; use "
            "--stream with fewer or shorter held-out contexts"
        )
    return max(1, -(-other // int(disk - always)))
