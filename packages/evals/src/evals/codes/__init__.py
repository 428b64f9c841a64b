"""Other ways to spend 16 bytes on a key, each at its best: what `evals codes` compares the hashers' codes with."""

from evals.codes.table import CODES

__all__ = ["CODES"]
