"""The base class of all variants: one layer's hash functions."""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

import math
from typing import cast

import hashcore
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hashtrain.config import MAX_DIGITS, HasherConfig, Heads
from hashtrain.data.captured import Capture

REMAINDER_TERMS = 6
"""Five coefficients for eq. 15 and the slope for eq. 16."""

Draw = torch.Generator | None
"""Generator for initial values; None leaves tensors uninitialised, to be loaded into."""


def rotation(head_dim: int, bits: int, generator: torch.Generator) -> Tensor:
    """Draw a random rotation in SO(head_dim); if bits > head_dim, several independent ones side by side.

    Returns: float32 [head_dim, bits]. Source: docs/algorithm.md, Variants; paper, appendix (angular LSH).
    """
    blocks: list[Tensor] = []
    for _ in range(math.ceil(bits / head_dim)):
        drawn = torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float32)
        q, r = cast("tuple[Tensor, Tensor]", torch.linalg.qr(drawn))
        q = q * r.diagonal().sign()  # makes the draw uniform over O(d)
        if torch.linalg.det(q) < 0:
            q[:, 0] = -q[:, 0]
        blocks.append(q)
    return torch.cat(blocks, dim=1)[:, :bits].contiguous()


def rotations(heads: int, head_dim: int, bits: int, generator: Draw) -> Tensor:
    """Draw a `rotation` for each KV head: float32 [heads, head_dim, bits]."""
    if generator is None:
        return torch.empty(heads, head_dim, bits, dtype=torch.float32)
    return torch.stack([rotation(head_dim, bits, generator) for _ in range(heads)])


class LayerHasher(nn.Module):
    """Base of the variants.

    Deployment hashes per KV head: one code per key and KV head, one selection per KV head. Hashing per query head is
    the paper's quality protocol, kept for its tables.
    """

    target_heads: Heads = "kv"
    """Kind of target: `kv` sums attention over the group, as deployed; `query` treats each head separately."""
    starts = False
    """Whether `start` computes functions from data, with which the variant can do without training."""
    estimates_products = False
    """Whether training scores estimate q . k, summed over the group; else they are in units of +-bits."""
    remainder: Tensor
    """Coefficients of eq. 15 and the slope of eq. 16, float32 [Hq, 6]; zeros until they are fitted."""

    def __init__(self, config: HasherConfig):
        super().__init__()
        shape = config.shape
        self.hq: int = shape.num_query_heads
        self.hkv: int = shape.num_kv_heads
        self.d: int = shape.head_dim
        self.bits: int = config.bits
        self.group: int = shape.group
        self.register_buffer("remainder", torch.zeros(self.hq, REMAINDER_TERMS, dtype=torch.float32))

    @property
    def calibrated(self) -> bool:
        """Whether `remainder` has been fitted (`hashtrain.evaluation.calibration`)."""
        return bool(self.remainder.any())

    def start(self, data: Capture, layer: int, most_digits: int = MAX_DIGITS) -> None:
        """Initialise from captured queries and keys, before training. Most variants do not need this.

        Args:
            data: the training capture; layer: the layer's index in the model.
            most_digits: most bits that `transform` gives one dimension of a head.
        Raises: FloatingPointError if no context has finite queries and keys.
        """

    @torch.no_grad()
    def round_matrices(self) -> None:
        """Round all matrices to float16 numbers, so that a GPU can read them as such: half the bytes.

        They stay float32 tensors, so every device computes with the same numbers. Nothing changes if a column of a
        matrix would move by more than a thousandth of its length, as numbers do that float16 is too narrow for.
        """
        found = [x for x in (*self.parameters(), *self.buffers()) if x.dim() == 3 and x.shape[1] > 1]
        rounded = [x.half().float() for x in found]
        lost = [((new - x).square().sum(1), x.square().sum(1)) for x, new in zip(found, rounded, strict=True)]
        if all(bool((error <= 1e-6 * size).all()) for error, size in lost):
            for x, new in zip(found, rounded, strict=True):
                x.copy_(new)

    def by_group(self, x: Tensor) -> Tensor:
        """View [B, Hq, T, ...] as [B, Hkv, G, T, ...]."""
        return cast(Tensor, x.unflatten(1, (self.hkv, self.group)))

    @property
    def key_bits(self) -> int:
        """Bits stored per token and KV head."""
        return self.bits

    def scores(self, q: Tensor, k: Tensor, per_query_head: bool = False) -> Tensor:
        """Score queries [B, Hq, R, D] against all keys [B, Hkv, T, D]: [B, Hkv, R, T], or [B, Hq, R, T].

        int32 (eq. 4). Higher is better.
        """
        return self.scores_of(q, self.encode_keys(k, per_query_head), per_query_head)

    def scores_of(self, q: Tensor, codes: Tensor, per_query_head: bool = False) -> Tensor:
        """Score queries against keys that `encode_keys` has hashed, for the same kind of heads: as `scores`."""
        planes, weights = self.encode_queries(q, per_query_head)
        return hashcore.score(planes, codes[:, :, None], weights=weights)

    def encode_keys(self, k: Tensor, per_query_head: bool = False) -> Tensor:
        """Hash keys [B, Hkv, T, D] to int32 codes [B, Hkv, T, W], or [B, Hq, T, W] per query head."""
        raise NotImplementedError

    def encode_queries(self, q: Tensor, per_query_head: bool = False) -> tuple[Tensor, tuple[int, ...]]:
        """Hash queries [B, Hq, T, D] to planes [B, Hkv, T, P, W] (or [B, Hq, T, P, W]) and the planes' weights."""
        raise NotImplementedError

    def soft_queries(self, q: Tensor) -> Tensor:
        """Hash queries [B, Hq, R, D] differentiably: [B, H, R, bits], for H target heads."""
        raise NotImplementedError

    def soft_keys(self, k: Tensor) -> Tensor:
        """Hash keys [B, H, T, D], one per target head, differentiably: [B, H, T, bits].

        The inner product of soft queries and soft keys is the deployed score up to a factor per row.
        """
        raise NotImplementedError


def normal(size: tuple[int, ...], generator: Draw) -> Tensor:
    """Draw standard normal numbers: float32 of this size."""
    if generator is None:
        return torch.empty(size, dtype=torch.float32)
    return torch.randn(size, generator=generator, dtype=torch.float32)


def uniform(size: tuple[int, ...], fan_in: int, generator: Draw) -> Tensor:
    """Draw torch's default initialisation of linear layers: uniform within 1 / sqrt(fan_in)."""
    if generator is None:
        return torch.empty(size, dtype=torch.float32)
    return (torch.rand(size, generator=generator, dtype=torch.float32) * 2 - 1) / math.sqrt(fan_in)


class SkipMlp(nn.Module):
    """x R + SiLU(x W1 + b1) W2 + b2 for x [B, heads, T, d]; close to x R at the start.

    Args:
        start: R, float32 [heads, d, out].
        hidden: width of the MLP.
    """

    def __init__(self, start: Tensor, hidden: int, generator: Draw):
        super().__init__()
        heads, d, out = start.shape
        self.r: nn.Parameter = nn.Parameter(start.clone())
        self.w1: nn.Parameter = nn.Parameter(normal((heads, d, hidden), generator) / math.sqrt(d))
        self.b1: nn.Parameter = nn.Parameter(torch.zeros(heads, 1, hidden, dtype=torch.float32))
        self.w2: nn.Parameter = nn.Parameter(normal((heads, hidden, out), generator) * 0.01)
        self.b2: nn.Parameter = nn.Parameter(torch.zeros(heads, 1, out, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x @ self.r + F.silu(x @ self.w1 + self.b1) @ self.w2 + self.b2
