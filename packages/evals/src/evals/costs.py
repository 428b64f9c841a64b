"""The cost of one sparse decode step of one layer, by formula, and the bytes that each method stores.

n cached tokens, k of them attended to; Hq query and Hkv KV heads of size D, G = Hq / Hkv; codes of B bits in W = B / 32
words; P planes; hash functions x R + SiLU(x W1) W2 of hidden width M. Keys and values are bfloat16, scores 2 bytes,
hash weights bfloat16, codes int32 words. A multiply-add counts as two operations, a word operation (xor, not, popcount,
add) as one. Each part reads the output of the one before; gathered values stay on the chip for attention.
"""

from dataclasses import dataclass, replace

from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.config import VARIANTS

from evals.rivals import RIVALS

_ELEMENT = 2  # bytes of a key, value or weight component
_SCORE = 2
_INDEX = 4


@dataclass(frozen=True)
class Cost:
    """Operations, and bytes read or written."""

    operations: int
    bytes: int


def sparse_step(shape: ModelShape, n: int, k: int, bits: int, planes: int, hidden: int) -> dict[str, Cost]:
    """Return the cost of each part of a decode step in one layer with `planes`, batch 1."""
    hq, hkv, d, words = shape.num_query_heads, shape.num_kv_heads, shape.head_dim, bits // 32
    weights = d * bits + d * hidden + hidden * bits
    vectors = hq + hkv  # one function per query head, and one per KV head for the new key
    packed = hkv * (planes + 1)  # the planes of each group's query, and the new key's code
    return {
        "hash": Cost(
            2 * weights * vectors + (hq - hkv) * bits, _ELEMENT * (weights + d) * vectors + 4 * 2 * hkv * bits
        ),
        "pack": Cost(packed * bits, 4 * 2 * hkv * bits + 4 * packed * words),
        "score": Cost(4 * n * hkv * planes * words, n * hkv * (4 * words + _SCORE)),
        "select": Cost(2 * n * hkv, n * hkv * _SCORE + _INDEX * k * hkv),
        "gather": Cost(0, k * hkv * 2 * d * _ELEMENT + _INDEX * k * hkv),
        "attend": Cost(4 * k * hq * d, 2 * hq * d * _ELEMENT),
    }


def dense_step(shape: ModelShape, n: int) -> Cost:
    """Return the cost of dense attention in a decode step of one layer, batch 1."""
    hq, hkv, d = shape.num_query_heads, shape.num_kv_heads, shape.head_dim
    return Cost(4 * n * hq * d, n * hkv * 2 * d * _ELEMENT + 2 * hq * d * _ELEMENT)


def kept_bytes(shape: ModelShape, bits: int) -> dict[str, float]:
    """Return the bytes that each method stores per token and KV head, in addition to keys and values.

    Sizes of codes come from the hashers; the rivals have their published parameters.

    Args:
        bits: of a code; `paper` has one per query head.
    """
    layer = replace(shape.at(0), num_layers=1)
    hidden = 2 * layer.head_dim  # enough for every variant's start; does not affect the stored bytes
    codes = {v: Hasher(HasherConfig(v, layer, bits=bits, hidden=hidden), 0).layer(0).key_bits for v in VARIANTS}
    rivals = {name: rival.kept_bits(rival.published[0], shape.head_dim) for name, rival in RIVALS.items()}
    return {name: found / 8 for name, found in {"oracle": 0, "recent": 0, **codes, **rivals}.items()}


def kv_bytes(shape: ModelShape) -> int:
    """Return the bytes of one token's key and value in one KV head."""
    return 2 * shape.head_dim * _ELEMENT
