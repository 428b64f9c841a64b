"""Predicts the time of a layer's attention on a GPU from the bytes that it moves and the kernels that it launches.

Nothing here was measured. docs/gpu.md shows these predictions, and tools/gpu_suite.py prints them beside measurements.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

from sparse_decode.costs.traffic import state_bytes

sys.path.append(str(Path(__file__).resolve().parents[2] / "hashcore" / "benchmarks"))  # also for who imports this
import gpu_traffic

REACHED = 0.85
"""Share of the bandwidth reached by kernels that only read."""
LAUNCH_US = 2.0
"""Time of a dependent launch in a CUDA graph, in microseconds."""
MASKED_BYTES = 28
"""Bytes per key that a step with a mask moves beside the codes: 32-bit scores are written, read and written to hide
tokens, and read four times to select."""
SMS = 132
"""SMs of the GPU whose searches are divided among blocks; the bytes hardly depend on it."""


class Card(NamedTuple):
    """A GPU: its name, how its driver calls it, and its memory bandwidth according to the data sheet, in TB/s."""

    name: str
    pattern: str
    bandwidth: float

    @property
    def bytes_per_us(self) -> float:
        """Bytes per microsecond that kernels are assumed to reach."""
        return self.bandwidth * 1e6 * REACHED


CARDS = (
    Card("A100 80 GB", r"A100.*80GB", 2.04),
    Card("H100", r"H100 80GB HBM3", 3.35),
    Card("H200", r"H200", 4.8),
    Card("L4", r"\bL4$", 0.3),
    Card("RTX 4090", r"RTX 4090$", 1.01),
)


def card_of(device: str) -> Card | None:
    """Return the card that a driver calls by this name; None if it is not listed."""
    return next((card for card in CARDS if re.search(card.pattern, device)), None)


class Layer(NamedTuple):
    """A sparse layer and its hash functions; keys and values have 16 bits per number."""

    kv_heads: int = 8
    query_heads: int = 32
    dim: int = 128
    bits: int = 128
    planes: int = 6
    hidden: int = 128
    fraction: float = 0.02

    def dense_bytes(self, tokens: int, batch: int = 1) -> float:
        """Return the bytes of keys and values of `batch` sequences."""
        return batch * tokens * self.kv_heads * 2 * self.dim * 2

    def search_bytes(self, tokens: int, batch: int = 1) -> float:
        """Return the bytes that a search moves."""
        weights = tuple(1 << plane for plane in range(self.planes))
        rows = batch * self.kv_heads, tokens, self.bits // 32, weights, int(self.fraction * tokens), SMS
        return gpu_traffic.search(*rows).total

    def selected_bytes(self, tokens: int, batch: int = 1) -> float:
        """Return the bytes of search and attention: what a step moves without hashing and without the remainder."""
        return self.search_bytes(tokens, batch) + self.fraction * self.dense_bytes(tokens, batch)

    def masked_bytes(self, tokens: int, batch: int = 1) -> float:
        """Return the bytes that selecting moves in a step with a mask: of a static cache, or with padding."""
        return batch * self.kv_heads * tokens * (self.bits // 8 + MASKED_BYTES)

    def sparse_bytes(self, tokens: int, batch: int = 1, masked: bool = False) -> float:
        """Return the bytes that a whole step moves, with hash functions of 16 bits and the remainder's sums."""
        dim, bits, hidden = self.dim, self.bits, self.hidden
        functions = 2 * (self.kv_heads + self.query_heads) * (dim * bits + dim * hidden + hidden * bits)
        sums = batch * self.kv_heads * state_bytes(dim)
        search = self.masked_bytes(tokens, batch) if masked else self.search_bytes(tokens, batch)
        return search + functions + sums + self.fraction * self.dense_bytes(tokens, batch)


def predicted_us(size: float, launches: int, bytes_per_us: float) -> float:
    """Return the microseconds in a CUDA graph of launches that move `size` bytes."""
    return size / bytes_per_us + launches * LAUNCH_US
