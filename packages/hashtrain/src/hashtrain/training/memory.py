"""Memory of a training step, computed before it starts."""

import math

from hashtrain.config import HasherConfig
from hashtrain.layers import BY_VARIANT, shapes
from hashtrain.training.train_config import TrainConfig

_FLOAT = 4


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
