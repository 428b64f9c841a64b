"""Compile the CPU's kernels while the model runs: later, each worker would compile them for itself."""

import hashcore
import torch

from hashtrain.evaluation.metrics import best_searched
from hashtrain.training.loss import ranking_loss


def compile_kernels() -> None:
    """Run each kernel that training and evaluation on the CPU need, on a few numbers; the compiled code is cached."""
    codes, rows = torch.zeros(1, 2, 64, 4, dtype=torch.int32), torch.arange(56, 64)
    scores = hashcore.score(codes[:, :, rows].unsqueeze(-2), codes[:, :, None], weights=(1,))
    best_searched(scores, rows, 0.5)
    some = torch.zeros(1, 1, 1, 8)
    ranking_loss(some, some, some == 0)
