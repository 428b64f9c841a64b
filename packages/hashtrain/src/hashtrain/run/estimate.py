"""Estimate a run's cost: disk and memory by arithmetic, time by running a sample of each kind of work."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hashtrain.artefact.hasher import make_layer
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.data.capture import context_bytes, run_context
from hashtrain.data.captured import Capture, InMemory
from hashtrain.evaluation.evaluate import evaluate_layer
from hashtrain.evaluation.remainder import MAX_CONTEXTS, calibrate
from hashtrain.layers import BY_VARIANT, shapes
from hashtrain.layers.transform import CONTEXTS
from hashtrain.machine.workers import one_thread
from hashtrain.run.job import LayerJob
from hashtrain.run.prepare import Prepared
from hashtrain.run.sources import loaded
from hashtrain.settings.train_command import TrainCommand
from hashtrain.training.train_config import TrainConfig
from hashtrain.training.trainer import Training

_STEPS, _FLOAT = 3, 4


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds of a whole run."""

    disk: int
    step_memory: int
    """Bytes on the device to train the largest layer, or with --stream all layers."""
    model_memory: int
    """Bytes of the model while it captures queries and keys."""
    capture_seconds: float
    train_seconds: float
    traffic: int = 0
    """Bytes that all training steps read from the disk or its cache."""
    streamed: bool = False

    def lines(self) -> list[str]:
        """Format the estimate as lines of text."""
        return [
            f"disk while it runs   {self.disk / 1e9:.2f} GB",
            *([] if self.streamed else [f"read to train        {self.traffic / 1e9:.2f} GB"]),
            f"memory to capture    {self.model_memory / 1e9:.2f} GB a process for the weights alone",
            f"memory to train      {self.step_memory / 1e9:.2f} GB "
            + ("for all layers, beside the model" if self.streamed else "a layer"),
            f"time to capture      {clock(self.capture_seconds)}",
            f"time to train        {clock(self.train_seconds)}",
        ]


def estimate(prepared: Prepared, jobs: Sequence[LayerJob], workers: int) -> Estimate:
    """Run one context, a few steps of each hasher and one evaluation, and extrapolate. Nothing is written.

    `jobs` are every layer of every hasher, and `workers` the processes of all machines.
    """
    command = prepared.command
    model, _ = loaded(command.model_path, prepared.device, command.backbone_memory)
    with one_thread():
        began = time.perf_counter()
        tensors, scalings = run_context(model, prepared.train.contexts[0])
        once = time.perf_counter() - began
        sample = InMemory(tensors, scalings)
        seconds = {job.recipe.name: _layer_seconds(prepared, job, sample) for job in jobs if job.layer == 0}
    lacking = sum(len(source.lacking) for source in prepared.sources)
    trained = [job for job in jobs if job.recipe.trained] or list(jobs)
    sizes = [(job.config.at(job.layer), job.training) for job in trained]
    steps = [(step_bytes(config, training, command.context), weight_bytes(config)) for config, training in sizes]
    return Estimate(
        disk=prepared.disk,
        step_memory=together(steps) + prepared.reads.step_bytes if command.stream else max(step for step, _ in steps),
        model_memory=int(1e9 * (command.backbone_memory or 0))
        or sum(p.numel() * p.element_size() for p in model.parameters()),
        capture_seconds=once * (lacking / workers + command.steps * command.stream),
        # Streaming trains in one process per rank, whatever --workers is.
        train_seconds=sum(seconds[job.recipe.name] for job in jobs)
        / (prepared.ranks.world if command.stream else workers),
        traffic=0 if command.stream else traffic(command, prepared.shape),
        streamed=command.stream,
    )


def traffic(command: TrainCommand, shape: ModelShape) -> int:
    """Return the bytes that all training steps of all hashers read."""
    step = context_bytes(shape, command.context, torch.bfloat16, command.rows, values=False)
    return step * command.steps * sum(recipe.trained for recipe in command.recipes)


def together(steps: list[tuple[int, int]]) -> int:
    """Return the bytes of layers that train in parallel, given those of each one's step and of its weights with their
    moments: the weights of all, and the largest step's other needs."""
    return sum(weights for _, weights in steps) + max((step - weights for step, weights in steps), default=0)


def step_bytes(config: HasherConfig, training: TrainConfig, context: int) -> int:
    """Return an upper estimate of the bytes that one step needs on its device, in float32 except the captured keys.

    With Hq query heads, H target heads, T tokens per context, R rows per chunk, A and C tokens of its pairs:

        attention   4 Hq R T          logits, probabilities, their sum over the group, the masked ones
        keys        Hkv T D x 2       bfloat16, including the next step's, and float32; a copy for each query head if
                                      the target is per query head
        pairs       6 H R A C         differences, losses, and what their gradients need
        hashing     H R A (3 D + 3 hidden + 4 bits), the same for the C shared tokens and the R queries
        weights     5 x               parameters, gradients, two moments, a copy while they are updated

    Nothing grows with T squared or with `rows`, because chunks of rows are processed one after another. For Llama-3-8B
    (32 query heads, 8 KV heads of 128) at 8,192 tokens, with chunks of 64 rows and 8 x 512 pairs per row: attention
    0.27 GB, keys 0.07 GB, pairs 0.05 GB (per KV head) or 0.20 GB (per query head), hashing 0.1 GB and weights 0.1 GB.
    The sum is below 1 GB, where the paper needs 16 GB. The backbone is not in memory then: its queries and keys are on
    disk. With --stream it is, and so are the weights of all layers (`weight_bytes`).
    """
    shape = config.shape
    per_query_head = BY_VARIANT[config.variant].target_heads == "query"
    heads = shape.num_query_heads if per_query_head else shape.num_kv_heads
    rows = min(training.rows, training.chunk)
    attention = 4 * shape.num_query_heads * rows * context * _FLOAT
    keys = shape.num_kv_heads * context * shape.head_dim * 8 + (2 * heads * context * shape.head_dim)
    pairs = 6 * heads * rows * training.max_top * training.max_rest * _FLOAT
    hashed = heads * (rows * training.max_top + training.max_rest) + shape.num_query_heads * rows
    hashing = hashed * (3 * shape.head_dim + 3 * config.hidden + 4 * config.bits) * _FLOAT
    weights = weight_bytes(config)
    all_rows = 2 * shape.num_query_heads * training.rows * shape.head_dim + heads * training.rows * training.max_rest
    return keys + weights + all_rows + max(attention, pairs + hashing)


def weight_bytes(config: HasherConfig) -> int:
    """Return the bytes of a layer's parameters, gradients, two moments and a copy, float32."""
    return 5 * _FLOAT * sum(math.prod(size) for size in shapes(config.at(0)).values())


def _layer_seconds(prepared: Prepared, job: LayerJob, sample: Capture) -> float:
    hasher = make_layer(job.config, job.layer, job.command.seed).to(job.device)
    began = time.perf_counter()
    hasher.start(sample, job.layer, job.digits)
    total = (time.perf_counter() - began) * min(CONTEXTS, len(prepared.train.contexts))
    if job.recipe.trained:
        times: list[float] = []
        training = Training(hasher, job.layer, sample, job.training)
        training.run(lambda step, loss: times.append(time.perf_counter()), until=_STEPS)
        if len(times) > 1:  # the first step also warms up
            total += (times[-1] - times[0]) / (len(times) - 1) * job.command.steps
    with torch.device(job.device):
        began = time.perf_counter()
        calibrate(hasher, job.layer, sample, job.command.seed)
        total += (time.perf_counter() - began) * min(MAX_CONTEXTS, len(prepared.train.contexts))
        began = time.perf_counter()
        evaluate_layer(job.command, hasher, job.layer, sample)
    return total + (time.perf_counter() - began) * len(prepared.validation.contexts)


def clock(seconds: float) -> str:
    """Format a duration in a suitable unit."""
    minutes, hours = seconds / 60, seconds / 3600
    return f"{hours:.1f} h" if hours >= 1 else f"{minutes:.1f} min" if minutes >= 1 else f"{seconds:.0f} s"
