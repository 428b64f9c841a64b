"""Packs signs into words and back with numpy's vectorised packbits, which needs no compilation."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

BFLOAT16_INFINITY = 0x7F80


def pack(x: NDArray[Any], infinity: int | None = None) -> NDArray[np.int32]:
    """Pack the signs of [..., 32 W] numbers into [..., W] words (eq. 1).

    With `infinity`, x is int16: the bits of 16-bit floats, in a format whose bits of +infinity are `infinity`.
    """
    words = np.packbits(_positive(x, infinity), axis=-1, bitorder="little")
    return np.ascontiguousarray(words).view("<i4").astype(np.int32, copy=False)


def unpack(codes: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Unpack [..., W] words into [..., 32 W] bits."""
    octets = np.ascontiguousarray(codes, dtype="<i4").view(np.uint8)
    return np.unpackbits(octets, axis=-1, bitorder="little").view(np.bool_)


def _positive(x: NDArray[Any], infinity: int | None) -> NDArray[np.bool_]:
    if x.dtype == np.float16:  # numpy compares float16 one by one
        x, infinity = x.view(np.int16), 0x7C00
    if infinity is not None:  # positive floats order like their bits
        return (x > 0) & (x <= infinity)
    return x > 0
