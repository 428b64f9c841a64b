"""SIMD operations on bfloat16 for numba: the dot product of AVX512_BF16, and the tiles of Intel's AMX.

    sums[lane] += a[2 lane + 1] b[2 lane + 1] + a[2 lane] b[2 lane]      products and sums in float32, subnormal ones 0

A word is two neighbours of a sum: components 2i and 2i + 1 of a query or key, or one component of the values of tokens
2j and 2j + 1. So nothing is widened. Words of BLOCK tokens are put in order once, for all lines that use them:

    turn   keys [16, 32 n]  -> tile [16 n, BLOCK] of words       a lane is a token: no sum within a vector
    pair   values [2, 32 n] -> tile [32 n] of words              a lane is a component

A register of AMX has 16 rows of 64 bytes: rows of A are lines of words, and rows of B words of LANES tokens or
components. Linux grants them to a process that asks; each kernel configures them at its start and releases them at its
end.

Arrays are contiguous and one-dimensional; 16-bit rows are uint16, words uint32. Offsets and steps count elements and
are not checked. Sums have one order, whatever the number of lines.
"""

# llvmlite and numba are untyped.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import ctypes
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from hashcore.cpu.parts import inner
from llvmlite import ir
from numba import types

from sparse_decode.cpu.lanes import (
    BLOCK,
    FLOATS,
    LANES,
    VECTORS,
    WIDTH,
    WORD,
    WORDS,
    Code,
    all_lanes,
    emitted,
    larger,
    offset,
)

SIDE = 2 * LANES
"""Most rows of a product of AMX per call: two registers of A."""
POWERS = [0.009582853, 0.055906425, 0.240240986, 0.693124193, 1.0]
"""Coefficients of 2^r for |r| <= 1/2, highest first, to a relative error of 3e-6."""
LEAST = -126.0
"""Least exponent of a weight that is not 0: a smaller one, a subnormal number, would take thirty times as long."""
CONFIGURATION = np.zeros(64, np.uint8)
"""What `configure` loads: palette 1, and eight registers of 16 rows of 64 bytes."""
CONFIGURATION[0], CONFIGURATION[16:32:2], CONFIGURATION[48:56] = 1, 64, 16
_TILES = {"+amx-tile", "+amx-bf16"}
_SYSTEM_CALL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of x86-64
_A, _B, _C = (0, 1), (2, 3), (4, 5, 6, 7)
_ONES = ir.Constant(WORDS, [0x3F803F80] * LANES)  # twice 1 in bfloat16
_BYTE, _HALF = ir.IntType(8), ir.IntType(16)


class _BFloat(ir.HalfType):
    def __str__(self) -> Any:
        return "bfloat"


_BFloat._create_instance()
_NUMBERS = ir.VectorType(_BFloat(), 2 * LANES)


@functools.cache
def features() -> frozenset[str]:
    """Return the features of the processor that numba compiles for, each after a + or -, as LLVM names them."""
    from numba.core.registry import cpu_target  # starts LLVM

    return frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))


@functools.cache
def supported() -> bool:
    """Whether numba compiles for a processor with AVX512_BF16."""
    return "+avx512bf16" in features()


@functools.cache
def granted() -> bool:
    """Whether the processor has AMX for bfloat16, and the system lets this process use it."""
    if not sys.platform.startswith("linux") or not features() >= _TILES:
        return False
    return ctypes.CDLL(None).syscall(_SYSTEM_CALL, _REQUEST, _TILE_DATA) == 0


# ---- Words in order --------------------------------------------------------------------------------------------------


def _in_four(of: int) -> tuple[list[int], list[int]]:
    """Return shuffle masks that interleave the lower and the upper halves of groups of 4 lanes by `of` lanes."""
    first = [i * of + j + side for i in range(2 // of) for side in (0, LANES) for j in range(of)]
    lower = [4 * four + lane for four in range(LANES // 4) for lane in first]
    return lower, [lane + 2 for lane in lower]


@emitted()
def turn(code: Code, x: Any, at: Any, step: Any, count: Any, tile: Any, to: Any) -> None:
    """Write the words of rows [16, 32 count] of x to columns of tile [16 count, BLOCK], from `to` on."""
    with code.loop(count) as loop:
        for q in range(4):  # words 4q to 4q + 3
            rows = [code.sum(at, code.times(step, t), code.times(loop.index, WIDTH), 8 * q) for t in range(LANES)]
            parts = [code.read(x, row, ir.VectorType(WORD, 4)) for row in rows]
            held = []
            for i in range(4):  # group l of 4 lanes: token 4l + i
                halves = [code.shuffled(parts[i + 8 * h], parts[i + 8 * h + 4], list(range(8))) for h in (0, 1)]
                held.append(code.shuffled(*halves, list(range(16))))
            mixed = [code.shuffled(held[i], held[i + 1], side) for i in (0, 2) for side in _in_four(1)]
            found = [code.shuffled(mixed[i], mixed[i + 2], side) for i in (0, 1) for side in _in_four(2)]
            for w, line in enumerate(found):
                row = code.sum(code.times(loop.index, LANES), 4 * q + w)
                code.write(line, tile, code.sum(to, code.times(row, BLOCK)))


@emitted()
def pair(code: Code, x: Any, at: Any, step: Any, count: Any, tile: Any, to: Any) -> None:
    """Write the components of rows [2, 32 count] of x to tile as words of one component each, from `to` on."""
    with code.loop(count) as loop:
        i = code.times(loop.index, WIDTH)
        rows = [code.read(x, code.sum(at, i, s), ir.VectorType(_HALF, 2 * LANES)) for s in (0, step)]
        for half in range(2):
            lanes = [LANES * half + lane + side for lane in range(LANES) for side in (0, WIDTH)]
            line = code.bitcast(code.shuffled(*rows, lanes), WORDS)
            code.write(line, tile, code.sum(to, i, LANES * half))


# ---- Products --------------------------------------------------------------------------------------------------------


def _paired(code: Code, total: Any, a: Any, b: Any) -> Any:
    """Return total + the products of two vectors of words."""
    return code.instruct("x86.avx512bf16.dpbf16ps.512", FLOATS, total, a, b)


def _summing(fresh: bool) -> Any:
    """Return an intrinsic: C [rows, BLOCK] = factor A [rows, depth] B [depth, BLOCK] if fresh, else C + A B.

    A has up to MOST_ROWS rows. On the way it prefetches later rows of x to the L2 cache: `quarters` times 16 rows from
    x_at on, a cache line of each quarter at a step. Spread like this, prefetches do not wait for one another.
    """

    @emitted()
    def product(
        code: Code, rows: Any, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, b_step: Any, depth: Any,
        factor: Any, c: Any, c_at: Any, c_step: Any, x: Any, x_at: Any, x_step: Any, quarters: Any,
    ) -> None:  # fmt: skip
        def emit(count: int) -> None:
            cells = [(row, i) for row in range(count) for i in range(VECTORS)]
            places = {(row, i): code.sum(c_at, code.times(c_step, row), LANES * i) for row, i in cells}
            sums = {cell: code.held(all_lanes(0) if fresh else code.read(c, places[cell])) for cell in cells}
            with code.loop(depth) as loop:
                line, row = code.udiv(loop.index, offset(LANES)), code.and_(loop.index, offset(LANES - 1))
                later = code.sum(x_at, code.times(x_step, row), code.times(line, WIDTH))
                with code.loop(quarters) as quarter:
                    code.prefetch(x, code.sum(later, code.times(code.times(x_step, LANES), quarter.index)), 2)
                words = code.sum(b_at, code.times(b_step, loop.index))
                right = [code.read(b, code.sum(words, LANES * i), WORDS) for i in range(VECTORS)]
                for row in range(count):
                    left = code.element(a, code.sum(a_at, code.times(a_step, row), loop.index), WORDS)
                    for i in range(VECTORS):
                        code.store(_paired(code, code.load(sums[row, i]), left, right[i]), sums[row, i])
            for cell, place in places.items():
                total = code.load(sums[cell])
                code.write(code.fmul(total, code.spread(factor)) if fresh else total, c, place)

        code.by_rows(rows, emit)

    return product


products: Any = _summing(fresh=True)
weighed: Any = _summing(fresh=False)


@numba.njit(inline="always")
def weigh(
    weights: Any, at: Any, step: Any, rows: Any, tile: Any, depth: Any, out: Any, to: Any, wide: Any, x: Any,
    x_at: Any, x_step: Any, quarters: Any,
) -> None:  # fmt: skip # pragma: no cover - compiled
    """Add weights [up to MOST_ROWS rows, depth] times tile [depth, wide] to out, and prefetch rows of x.

    BLOCK divides wide.
    """
    one = np.float32(1)
    for i in range(0, wide, BLOCK):
        weighed(rows, weights, at, step, tile, i, wide, depth, one, out, to + i, wide, x, x_at + i, x_step, quarters)


def _of_tiles(emit: Callable[..., None]) -> Callable[..., None]:
    """Emit nothing for a processor without AMX. Kernels never run that part (`granted`), but LLVM cannot compile it."""

    @functools.wraps(emit)
    def where_known(*given: Any) -> None:
        if features() >= _TILES:
            emit(*given)

    return where_known


@emitted()
@_of_tiles
def configure(code: Code, configuration: Any) -> None:
    """Load CONFIGURATION on this thread."""
    code.instruct("x86.ldtilecfg", ir.VoidType(), configuration)


@emitted()
@_of_tiles
def release(code: Code) -> None:
    """Release the registers of AMX of this thread."""
    code.instruct("x86.tilerelease", ir.VoidType())


def _tiled(fresh: bool, tall: bool) -> Any:
    """Return an intrinsic: C = A B if fresh, else C + A B, of A [rows, depth] and B [depth, columns]; depth in words.

    tall: 2 LANES rows and columns, else LANES rows and 4 LANES columns. A and B are arrays of words, C of float32;
    LANES divides depth.
    """
    cells = [(i, j) for i in range(2 if tall else 1) for j in range(2 if tall else 4)]

    @emitted()
    @_of_tiles
    def product(
        code: Code, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, b_step: Any, depth: Any, c: Any, c_at: Any,
        c_step: Any,
    ) -> None:  # fmt: skip
        def instruct(name: str, *given: Any) -> None:
            tiles = [ir.Constant(_BYTE, x) if isinstance(x, int) else x for x in given]
            code.instruct(f"x86.{name}", ir.VoidType(), *tiles)

        def load(tile: int, x: Any, place: Any, step: Any) -> None:
            instruct("tileloadd64", tile, code.at(x, place, _BYTE), code.times(step, 4))

        places = [code.sum(c_at, code.times(c_step, LANES * i), LANES * j) for i, j in cells]
        for tile, place in zip(_C, places, strict=True):
            instruct("tilezero", tile) if fresh else load(tile, c, place, c_step)
        with code.loop(depth, LANES) as loop:
            word = code.times(loop.index, LANES)
            for i in sorted({i for i, _ in cells}):
                load(_A[i], a, code.sum(a_at, code.times(a_step, LANES * i), word), a_step)
            for j in sorted({j for _, j in cells}):
                load(_B[j % 2], b, code.sum(b_at, code.times(b_step, word), LANES * j), b_step)
                for tile, cell in zip(_C, cells, strict=True):
                    if cell[1] == j:
                        instruct("tdpbf16ps", tile, _A[cell[0]], _B[j % 2])
        for tile, place in zip(_C, places, strict=True):
            instruct("tilestored64", tile, code.at(c, place, _BYTE), code.times(c_step, 4))

    return product


tile_products, tile_sums = _tiled(fresh=True, tall=True), _tiled(fresh=False, tall=True)
flat_products, flat_sums = _tiled(fresh=True, tall=False), _tiled(fresh=False, tall=False)


# ---- Lines of logits -------------------------------------------------------------------------------------------------


def _rounded(code: Code, first: Any, second: Any) -> Any:
    """Return two vectors of float32 as one of words of bfloat16, rounded to nearest, ties to even."""
    return code.bitcast(code.instruct("x86.avx512bf16.cvtne2ps2bf16.512", _NUMBERS, second, first), WORDS)


def _power(code: Code, y: Any) -> Any:
    """Return 2^y to a relative error of 3e-6; NaN stays NaN, and less than 2^LEAST is 0."""
    normal = code.bitcast(code.fcmp_unordered(">=", y, all_lanes(LEAST)), _HALF)
    n = code.instruct(f"roundeven.v{LANES}f32", FLOATS, y)
    r, p = code.fsub(y, n), all_lanes(POWERS[0])
    for coefficient in POWERS[1:]:
        p = code.fused(p, r, all_lanes(coefficient))
    current = ir.Constant(WORD, 4)
    return code.instruct("x86.avx512.mask.scalef.ps.512", FLOATS, p, n, all_lanes(0), normal, current)


@emitted(types.float32)
def _soften(code: Code, x: Any, at: Any, count: Any, top: Any, factor: Any) -> Any:
    binary, total = all_lanes(1 / math.log(2)), code.held(all_lanes(0))
    scale, less = code.fmul(code.spread(factor), binary), code.fneg(code.fmul(code.spread(top), binary))
    with code.loop(count, WIDTH) as loop:
        places = [code.sum(at, code.times(loop.index, WIDTH), half) for half in (0, LANES)]
        words = _rounded(code, *(_power(code, code.fused(code.read(x, place), scale, less)) for place in places))
        code.write(words, x, code.sum(at, code.times(loop.index, LANES)))
        code.store(_paired(code, code.load(total), words, _ONES), total)
    return code.joined(code.load(total), code.fadd)


@emitted()
def narrow(code: Code, x: Any, at: Any, count: Any, factor: Any, words: Any) -> None:
    """Write factor times the numbers of x, `count` from `at` on, as bfloat16 to words; WIDTH divides count."""
    with code.loop(count, WIDTH) as loop:
        places = [code.sum(at, code.times(loop.index, WIDTH), half) for half in (0, LANES)]
        found = [code.fmul(code.read(x, place), code.spread(factor)) for place in places]
        code.write(_rounded(code, *found), words, code.times(loop.index, LANES))


@emitted()
def raised(
    code: Code, x: Any, step: Any, lines: Any, count: Any, factor: Any, less: Any, first: Any, best: Any
) -> None:
    """Raise best [count] to the largest of factor x - less over `lines` lines, `step` apart, and each LANES numbers.

    less [first + lines] has a number for each line. NaN does not count.
    """
    scale, join = code.spread(factor), functools.partial(larger, code)
    with code.loop(count) as loop:
        most = code.held(all_lanes(-math.inf))
        with code.loop(lines) as line:
            place = code.sum(code.times(step, line.index), code.times(loop.index, LANES))
            number = code.fneg(code.element(less, code.sum(first, line.index)))
            code.store(join(code.load(most), code.fused(code.read(x, place), scale, number)), most)
        found, place = code.joined(code.load(most), join), code.gep(best, [loop.index])
        code.store(join(code.load(place), found), place)


# A function of its own, not inlined by numba: fastmath of a caller would change the order of sums.
@inner
def soften(x: Any, at: Any, count: Any, top: Any, factor: Any) -> Any:  # pragma: no cover - compiled
    """Replace numbers by the weights exp(factor x - top), rounded to bfloat16, and return their sum.

    The words of a line's weights begin where the line does.
    """
    return _soften(x, at, count, top, factor)
