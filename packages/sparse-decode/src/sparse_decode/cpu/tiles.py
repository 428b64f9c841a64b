"""Matrix products of bfloat16 by the tiles of Intel's AMX for numba: 16 x 16 sums of 32 products at once.

A tile is a register of 16 rows of 64 bytes. The layout is that of `bfloat_lanes`: a word is two neighbours of a sum,
rows of A are lines of words, and rows of B are words of LANES tokens or components. Linux grants the registers to a
process that asks; each kernel configures them at its start and releases them at its end.
"""

# llvmlite and numba are untyped.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import ctypes
import functools
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sparse_decode.cpu.bfloat_lanes import features
from sparse_decode.cpu.lanes import LANES, _call, _data, _lines, _Numbers

SIDE = 2 * LANES
"""Most rows of a product per call: two tiles of A."""
CONFIGURATION = np.zeros(64, np.uint8)
"""What `configure` loads: palette 1, and eight tiles of 16 rows of 64 bytes."""
CONFIGURATION[0] = 1
CONFIGURATION[16:32:2] = 64
CONFIGURATION[48:56] = 16
_SYSTEM_CALL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of x86-64
_A, _B, _C = (0, 1), (2, 3), (4, 5, 6, 7)


@functools.cache
def granted() -> bool:
    """Whether the processor has tiles for bfloat16, and the system lets this process use them."""
    if not sys.platform.startswith("linux") or not {"+amx-tile", "+amx-bf16"} <= features():
        return False
    return ctypes.CDLL(None).syscall(_SYSTEM_CALL, _REQUEST, _TILE_DATA) == 0


def _tile(number: int) -> Any:
    return ir.Constant(ir.IntType(8), number)


def _instruct(builder: Any, name: str, *given: Any) -> None:
    _call(builder, f"llvm.x86.{name}", ir.VoidType(), list(given))


@intrinsic
def configure(typing_context: Any, configuration: Any):
    """Load CONFIGURATION on this thread."""
    _lines(configuration)

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = _data(context, builder, signature.args[0], values[0])
        _instruct(builder, "ldtilecfg", builder.bitcast(data, ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(configuration), emit


@intrinsic
def release(typing_context: Any):
    """Release the tiles of this thread."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _instruct(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), emit


def _summing(fresh: bool, tall: bool) -> Any:
    """Return an intrinsic: C = A B if fresh, else C + A B, of A [rows, depth] and B [depth, columns]; depth in words.

    tall: 2 LANES rows and columns, else LANES rows and 4 LANES columns. A and B are arrays of words, C of float32;
    LANES divides depth.
    """
    shape = (2, 2) if tall else (1, 4)

    @intrinsic
    def product(
        typing_context: Any, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, b_step: Any, depth: Any, c: Any,
        c_at: Any, c_step: Any,
    ) -> Any:  # fmt: skip
        _lines(a, b, c)

        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            a, b, c = (_data(context, builder, signature.args[i], values[i]) for i in (0, 3, 7))
            (a_at, a_step), (b_at, b_step), depth, (c_at, c_step) = values[1:3], values[4:6], values[6], values[8:]
            by, wide = _Numbers(builder, a_at.type), ir.IntType(64)

            def at(x: Any, place: Any) -> Any:
                return builder.bitcast(builder.gep(x, [place]), ir.IntType(8).as_pointer())

            def bytes_of(step: Any) -> Any:
                return builder.mul(step, ir.Constant(wide, 4))

            cells = [(i, j) for i in range(shape[0]) for j in range(shape[1])]
            places = [at(c, by.sum(c_at, by.times(c_step, LANES * i), LANES * j)) for i, j in cells]
            for number, place in zip(_C, places, strict=True):
                if fresh:
                    _instruct(builder, "tilezero", _tile(number))
                else:
                    _instruct(builder, "tileloadd64", _tile(number), place, bytes_of(c_step))
            with by.loop(depth, LANES) as loop:
                word = by.times(loop.index, LANES)
                for i in range(shape[0]):
                    place = at(a, by.sum(a_at, by.times(a_step, LANES * i), word))
                    _instruct(builder, "tileloadd64", _tile(_A[i]), place, bytes_of(a_step))
                for j in range(shape[1]):
                    place = at(b, by.sum(b_at, by.times(b_step, word), LANES * j))
                    _instruct(builder, "tileloadd64", _tile(_B[j % 2]), place, bytes_of(b_step))
                    for i in range(shape[0]):
                        number = _C[cells.index((i, j))]
                        _instruct(builder, "tdpbf16ps", _tile(number), _tile(_A[i]), _tile(_B[j % 2]))
            for number, place in zip(_C, places, strict=True):
                _instruct(builder, "tilestored64", _tile(number), place, bytes_of(c_step))
            return context.get_dummy_value()

        n = types.intp
        return types.void(a, n, n, b, n, n, n, c, n, n), emit

    return product


tile_products: Any = _summing(fresh=True, tall=True)
tile_sums: Any = _summing(fresh=False, tall=True)
flat_products: Any = _summing(fresh=True, tall=False)
flat_sums: Any = _summing(fresh=False, tall=False)
