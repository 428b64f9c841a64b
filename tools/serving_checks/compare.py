"""The prompts of the serving checks, and the comparison of answers."""

import random
from typing import Any

LENGTHS = (1, 2, 31, 32, 33, 64, 100, 129, 200, 257, 300, 400, 555, 1000)
SHARED = 260
GAP = 1e-2  # nats: closer logits are near-ties


def requests(vocabulary: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Return prompts of many lengths, including two with a shared prefix."""
    draw = random.Random(0)
    prefix = [draw.randrange(3, vocabulary) for _ in range(SHARED)]
    made = [[draw.randrange(3, vocabulary) for _ in range(n)] for n in lengths]
    return [*made, [*prefix, 5, 6, 7], [*prefix, 9, 8]]


def differences(found: list[list[int]], expected: dict[str, Any]) -> tuple[int, list[str]]:
    """Compare with `attach`: return the number that differ at a near-tie, and the requests that differ elsewhere."""
    ties, wrong = 0, []
    for i, (mine, theirs) in enumerate(zip(found, expected["tokens"], strict=True)):
        at = next((j for j, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if at is not None:
            line = expected["logits"][i][at]
            gap = line[theirs[at]] - line[mine[at]]
            ties += gap <= GAP
            wrong += [f"request {i} differs at token {at} where logits lead by {gap:.4f}"] * (gap > GAP)
    return ties, wrong


def expected_counts(prompts: list[list[int]], new: int, fraction: float, below: int = 0) -> tuple[int, int]:
    """Return how many tokens decode rows read and see, for one query head of one layer, from lengths alone.

    The first new token comes from the prompt's last row, every other from its own decode row.
    """
    import torch
    from sparse_decode import Budget

    seen = torch.cat([torch.arange(len(p) + 1, len(p) + new) for p in prompts])
    return int(Budget(fraction, dense_below=below).count(seen).sum()), int(seen.sum())
