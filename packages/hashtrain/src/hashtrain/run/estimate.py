"""What a run takes, computed from the shapes: nothing is measured, nothing written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hashtrain.config import HasherConfig
from hashtrain.data.capture import context_bytes
from hashtrain.layers import BY_VARIANT, shapes
from hashtrain.run.job import LayerJob
from hashtrain.run.prepare import Prepared
from hashtrain.training.train_config import TrainConfig

_FLOAT = 4


@dataclass(frozen=True)
class Estimate:
    """Bytes that a whole run takes."""

    disk: int
    """Bytes of all captures that are stored at once, an upper bound: rows drawn twice are stored once."""
    waves: int
    """Number of parts in which the captures are made and used, to fit on the disk."""
    step_memory: int
    """Bytes on the device to train the largest layer."""
    model_memory: int
    """Bytes of the model's weights, which are on the device while it captures."""
    traffic: int
    """Bytes that all training steps read from the disk or its cache."""

    def lines(self) -> list[str]:
        """Format the estimate as lines of text."""
        return [
            f"disk while it runs   {self.disk / 1e9:.2f} GB, in {self.waves} wave{'s' * (self.waves > 1)}",
            f"read to train        {self.traffic / 1e9:.2f} GB",
            f"memory to capture    {self.model_memory / 1e9:.2f} GB a process for the weights alone",
            f"memory to train      {self.step_memory / 1e9:.2f} GB a layer",
        ]


def estimate(prepared: Prepared, jobs: Sequence[LayerJob]) -> Estimate:
    """Compute what a run takes; `jobs` are every layer of every hasher."""
    command, trained = prepared.command, [job for job in jobs if job.recipe.trained]
    read = context_bytes(prepared.shape, command.context, torch.bfloat16, command.rows, values=False)
    steps = [step_bytes(job.config.at(job.layer), job.training, command.context) for job in trained]
    hashers = sum(recipe.trained for recipe in command.recipes)
    return Estimate(
        prepared.disk, len(prepared.waves), max(steps, default=0), prepared.model_bytes, read * command.steps * hashers
    )


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
    The sum is below 1 GB, where the paper needs 16 GB. The model is not in memory then: its queries and keys are on
    disk.
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
    weights = 5 * _FLOAT * sum(math.prod(size) for size in shapes(config.at(0)).values())
    all_rows = 2 * shape.num_query_heads * training.rows * shape.head_dim + heads * training.rows * training.max_rest
    return keys + weights + all_rows + max(attention, pairs + hashing)
