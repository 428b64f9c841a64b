"""Signs to words and back, in numpy: packbits is vectorised and needs no compilation."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

BFLOAT16_INFINITY = 0x7F80


def pack(x: NDArray[Any], halves: int | None = None) -> NDArray[np.int32]:
    """Pack the signs of [..., 32 W] numbers into [..., W] words (eq. 1).

    With halves, x is int16: the bits of 16-bit floats whose infinity is halves.
    """
    words = np.packbits(_positive(x, halves), axis=-1, bitorder="little")
    return np.ascontiguousarray(words).view("<i4").astype(np.int32, copy=False)


def unpack(codes: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Unpack [..., W] words into [..., 32 W] bits."""
    octets = np.ascontiguousarray(codes, dtype="<i4").view(np.uint8)
    return np.unpackbits(octets, axis=-1, bitorder="little").view(np.bool_)


def _positive(x: NDArray[Any], halves: int | None) -> NDArray[np.bool_]:
    if x.dtype == np.float16:  # numpy compares halves one at a time
        x, halves = x.view(np.int16), 0x7C00
    if halves is not None:  # their bits order like integers up to infinity
        return (x > 0) & (x <= halves)
    return x > 0
