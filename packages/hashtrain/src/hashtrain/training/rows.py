"""The random numbers of a layer's training, drawn on the host so that all devices draw the same.

So it is known in advance which rows a step reads (`rows_of_steps`).
"""

import torch
from torch import Tensor

from hashtrain.training.train_config import TrainConfig


def generator_of(seed: int, layer: int) -> torch.Generator:
    """Return the random generator of a layer's training."""
    return torch.Generator("cpu").manual_seed(seed * 1_000_003 + layer)


def draw_rows(config: TrainConfig, tokens: int, generator: torch.Generator) -> Tensor:
    """Draw the query rows of a step from a context of `tokens` tokens: int64 [rows], on the host."""
    return torch.randint(config.min_position, tokens, (config.rows,), generator=generator, device="cpu")


def draw_tops(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw which tokens of the targets are compared: float32 from 0 to 1, on the host."""
    return torch.rand(size, generator=generator, device="cpu")


def draw_rest(tokens: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw the tokens to compare with those of the targets: int64 [count], on the host."""
    return torch.randint(tokens, (count,), generator=generator, device="cpu")


def rows_of_steps(config: TrainConfig, layer: int, heads: int, tokens: int) -> Tensor:
    """Compute in advance the query rows that each step of a layer's training will draw.

    Args:
        heads: number of target heads; pairs are drawn for each between the rows of two steps.
        tokens: of every context.
    Returns: int32 [steps, rows].
    """
    generator, found = generator_of(config.seed, layer), torch.empty(config.steps, config.rows, dtype=torch.int32)
    for step in range(config.steps):
        found[step] = draw_rows(config, tokens, generator)
        for start in range(0, config.rows, config.chunk):
            draw_tops((1, heads, min(config.chunk, config.rows - start), config.max_top), generator)
            draw_rest(tokens, config.max_rest, generator)  # uses the same number of random bits for any bound
    return found
