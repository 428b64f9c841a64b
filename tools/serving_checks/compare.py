"""What engines are asked, and how their answers are compared."""

import random
from typing import Any

LENGTHS = (1, 2, 31, 32, 33, 64, 100, 129, 200, 257, 300, 400, 555, 1000)
SHARED = 260
GAP = 1e-2  # nats: logits this close are as good as equal


def requests(vocabulary: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Prompts of many lengths, and two that begin alike."""
    draw = random.Random(0)
    prefix = [draw.randrange(3, vocabulary) for _ in range(SHARED)]
    made = [[draw.randrange(3, vocabulary) for _ in range(n)] for n in lengths]
    return [*made, [*prefix, 5, 6, 7], [*prefix, 9, 8]]


def differences(found: list[list[int]], expected: dict[str, Any]) -> tuple[int, list[str]]:
    """Compare with `attach`: how many part at a near-tie, and which part where there is none."""
    ties, wrong = 0, []
    for i, (mine, theirs) in enumerate(zip(found, expected["tokens"], strict=True)):
        at = next((j for j, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if at is not None:
            line = expected["logits"][i][at]
            gap = line[theirs[at]] - line[mine[at]]
            ties += gap <= GAP
            wrong += [f"request {i} parts at token {at} where logits lead by {gap:.4f}"] * (gap > GAP)
    return ties, wrong


def expected_counts(prompts: list[list[int]], new: int, fraction: float) -> tuple[int, int]:
    """Tokens that decode rows read and see, for one query head of one layer, by lengths alone.

    The first new token is made by the prompt's last row, each other by a row of its own.
    """
    import torch
    from sparse_decode import Budget

    seen = torch.cat([torch.arange(len(p) + 1, len(p) + new) for p in prompts])
    return int(Budget(fraction).count(seen).sum()), int(seen.sum())
