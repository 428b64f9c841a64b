"""SIMD operations on LANES numbers for numba: dot products of rows, and weighted sums of rows.

For such loops, LLVM's auto-vectoriser would sum within vectors, which takes longer than the products. LLVM splits
vectors of LANES numbers into the registers of the CPU. Arrays are contiguous and one-dimensional; offsets and steps
count elements and are not checked.

16-bit rows are bfloat16, the upper half of a float32. A vector of LANES 32-bit words holds 2 LANES of them. A shift and
a mask extract those at even and at odd places without moving data between lanes. Hence everything that is combined with
bfloat16 rows is stored in that order: of each 2 LANES numbers first the even ones, then the odd ones (`place`).
"""

# llvmlite and numba are untyped.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import functools
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
WIDTH = 2 * LANES
"""Columns of a weighted sum per call."""
MOST_ROWS = 4
"""Rows of a result per call: MOST_ROWS x TOKENS sums fill half of the AVX-512 registers."""
TOKENS = 4
"""Dot products of a row per call."""
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)


@numba.njit(inline="always")
def place(i: Any) -> Any:  # pragma: no cover - compiled
    """Return the position of component i in rows that are combined with bfloat16 rows."""
    return (i & -WIDTH) | ((i & 1) * LANES) | ((i & (WIDTH - 1)) >> 1)


def _data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.make_array(kind)(context, builder, value).data


def _vector(builder: Any, data: Any, at: Any, kind: Any) -> Any:
    """Return a pointer to the vector that starts at element `at`."""
    return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())


def _lines(*kinds: Any) -> None:
    if any(kind.layout != "C" or kind.ndim != 1 for kind in kinds):
        raise TypeError(f"expected contiguous one-dimensional arrays, got {kinds}")


def _wide(builder: Any, x: Any, at: Any) -> list[Any]:
    """Load WIDTH numbers of a row, float32 or bfloat16, as two vectors of float32."""
    number = at.type
    if x.type.pointee != ir.IntType(16):
        ends = at, builder.add(at, ir.Constant(number, LANES))
        return [builder.load(_vector(builder, x, end, _FLOATS), align=4) for end in ends]
    words = builder.load(_vector(builder, x, at, _WORDS), align=2)
    even = builder.shl(words, ir.Constant(_WORDS, [16] * LANES))
    odd = builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
    return [builder.bitcast(half, _FLOATS) for half in (even, odd)]


def _call(builder: Any, name: str, returns: Any, given: list[Any]) -> Any:
    kind = ir.FunctionType(returns, [x.type for x in given])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a b + c."""
    return _call(builder, f"llvm.fmuladd.v{LANES}f32", _FLOATS, [a, b, c])


def _spread(builder: Any, number: Any, kind: Any = _FLOATS) -> Any:
    """Return a vector that holds a number in each lane."""
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_WORDS, [0] * LANES))


def _by_rows(builder: Any, rows: Any, emit: Callable[[int], None]) -> None:
    """Emit code for each number of rows up to MOST_ROWS, and run that of `rows`, or of MOST_ROWS if they are more."""
    most = ir.Constant(rows.type, MOST_ROWS)
    rows = builder.select(builder.icmp_signed("<", rows, most), rows, most)
    for count in range(1, MOST_ROWS + 1):
        with builder.if_then(builder.icmp_signed("==", rows, ir.Constant(rows.type, count))):
            emit(count)


class _Numbers:
    """Arithmetic on numbers of the type of offsets."""

    def __init__(self, builder: Any, kind: Any):
        self._builder, self._kind = builder, kind

    def sum(self, *terms: Any) -> Any:
        return functools.reduce(self._builder.add, (self._value(x) for x in terms))

    def times(self, a: Any, b: Any) -> Any:
        return self._builder.mul(self._value(a), self._value(b))

    def parts(self, a: Any) -> tuple[Any, Any]:
        """Return a // LANES and a % LANES."""
        return self._builder.udiv(a, self._value(LANES)), self._builder.and_(a, self._value(LANES - 1))

    def loop(self, count: Any, step: int = 1) -> Any:
        """Emit a loop of count // step turns."""
        turns = self._builder.udiv(count, self._value(step)) if step > 1 else count
        return cgutils.for_range(self._builder, turns, intp=self._kind)

    def _value(self, x: Any) -> Any:
        return ir.Constant(self._kind, x) if isinstance(x, int) else x


def _prefetch(builder: Any, data: Any, at: Any, level: int) -> None:
    """Prefetch the cache line of an element; level: 3 for all caches, 2 for L2."""
    line = builder.bitcast(builder.gep(data, [at]), ir.IntType(8).as_pointer())
    read, is_data = 0, 1
    how = [ir.Constant(ir.IntType(32), n) for n in (read, level, is_data)]
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [line, *how])


@intrinsic
def prefetch(typing_context: Any, x: Any, at: Any) -> Any:
    """Prefetch the cache line of x[at]."""
    _lines(x)

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _prefetch(builder, _data(context, builder, signature.args[0], values[0]), values[1], 3)
        return context.get_dummy_value()

    return types.void(x, types.intp), emit


def _product(emit: Callable[[Any, int, _Numbers, Any, Any, Any, Any], None]) -> Any:
    """Return an intrinsic whose code `emit` generates, from A's rows, matrices A and B, their depth, and the result C.

    A matrix is an array, the element that starts its first row, and the distance of rows.
    """

    @intrinsic
    def product(
        typing_context: Any, rows: Any, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, b_step: Any, depth: Any,
        c: Any, c_at: Any, c_step: Any,
    ) -> Any:  # fmt: skip
        _lines(a, b, c)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            a, b, c = (
                (_data(context, builder, signature.args[i], values[i]), *values[i + 1 : i + 3]) for i in (1, 4, 8)
            )
            by = _Numbers(builder, values[0].type)
            _by_rows(builder, values[0], lambda count: emit(builder, count, by, a, b, values[7], c))
            return context.get_dummy_value()

        n = types.intp
        return types.void(n, a, n, n, b, n, n, n, c, n, n), generate

    return product


def _weigh(builder: Any, rows: int, by: _Numbers, a: Any, b: Any, depth: Any, c: Any) -> None:
    """Add A [rows, depth] B [depth, WIDTH] to C [rows, WIDTH], in the order of depth."""
    (a, a_at, a_step), (b, b_at, b_step), (c, c_at, c_step) = a, b, c
    cells = [(row, half) for row in range(rows) for half in range(2)]
    places = {(row, half): by.sum(c_at, by.times(c_step, row), half * LANES) for row, half in cells}
    places = {cell: _vector(builder, c, place, _FLOATS) for cell, place in places.items()}
    sums = {cell: cgutils.alloca_once_value(builder, builder.load(places[cell], align=4)) for cell in cells}
    with by.loop(depth) as loop:
        lines = _wide(builder, b, by.sum(b_at, by.times(b_step, loop.index)))
        for row in range(rows):
            one = by.sum(a_at, by.times(a_step, row), loop.index)
            factor = _spread(builder, builder.load(builder.gep(a, [one])))
            for half in range(2):
                held = sums[row, half]
                builder.store(_fused(builder, factor, lines[half], builder.load(held)), held)
    for cell in cells:
        builder.store(builder.load(sums[cell]), places[cell], align=4)


def _lanes(*of: tuple[int, ...]) -> tuple[list[int], ...]:
    """Return shuffle masks of vector pairs that take these lanes (0-3: first, 4-7: second) of each group of four."""
    return tuple(
        [4 * four + lane % 4 + LANES * (lane > 3) for four in range(LANES // 4) for lane in lanes] for lanes in of
    )


def _fours(*of: tuple[int, ...]) -> tuple[list[int], ...]:
    """Return shuffle masks of a pair of vectors that take these groups of four lanes."""
    return tuple([4 * four + lane for four in fours for lane in range(4)] for fours in of)


_ROUNDS = (
    _lanes((0, 4, 1, 5), (2, 6, 3, 7)),
    _lanes((0, 1, 4, 5), (2, 3, 6, 7)),
    _fours((0, 1, 4, 5), (2, 3, 6, 7)),
    _fours((0, 2, 4, 6), (1, 3, 5, 7)),
)
"""Shuffles that sum LANES vectors to one number each: in each of four rounds, pairs of vectors become one vector."""


def _summed(builder: Any, vectors: list[Any]) -> Any:
    """Return the vector of the sums of LANES vectors."""
    for sides in _ROUNDS:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        halves = [[builder.shuffle_vector(*pair, ir.Constant(_WORDS, side)) for side in sides] for pair in pairs]
        vectors = [builder.fadd(*pair) for pair in halves]
    return vectors[0]


def _dots(builder: Any, rows: int, by: _Numbers, a: Any, x: Any, width: Any, c: Any) -> None:
    """Write C [rows, TOKENS] = A [rows, width] X [TOKENS, width]^T; WIDTH divides width."""
    (a, a_at, a_step), (x, x_at, x_step), (c, c_at, c_step) = a, x, c
    cells, nothing = [(row, t) for row in range(rows) for t in range(TOKENS)], ir.Constant(_FLOATS, [0.0] * LANES)
    sums = {cell: cgutils.alloca_once_value(builder, nothing) for cell in cells}
    with by.loop(width, WIDTH) as loop:
        i = by.times(loop.index, WIDTH)
        keys = [_wide(builder, x, by.sum(x_at, by.times(x_step, token), i)) for token in range(TOKENS)]
        for row in range(rows):
            query = _wide(builder, a, by.sum(a_at, by.times(a_step, row), i))
            for token in range(TOKENS):
                total = builder.load(sums[row, token])
                for half in range(2):
                    total = _fused(builder, query[half], keys[token][half], total)
                builder.store(total, sums[row, token])
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    vectors = [builder.load(sums[cell]) for cell in cells]
    found = _summed(builder, vectors + [undefined] * (LANES - len(vectors)))
    few = ir.VectorType(ir.FloatType(), TOKENS)
    for row in range(rows):
        which = ir.Constant(ir.VectorType(ir.IntType(32), TOKENS), [TOKENS * row + i for i in range(TOKENS)])
        line = builder.shuffle_vector(found, undefined, which)
        builder.store(line, _vector(builder, c, by.sum(c_at, by.times(c_step, row)), few), align=4)


weighed: Any = _product(_weigh)
dots: Any = _product(_dots)


@numba.njit(inline="always")
def dot(
    queries: Any, step: Any, rows: Any, x: Any, at: Any, x_step: Any, width: Any, out: Any, to: Any, out_step: Any
) -> None:  # pragma: no cover - compiled
    """Write queries [rows, width] times the rows of x, [TOKENS, width], to out [rows, TOKENS]; WIDTH divides width.

    step, x_step and out_step are the distances between rows.
    """
    for row in range(0, rows, MOST_ROWS):
        dots(rows - row, queries, row * step, step, x, at, x_step, width, out, to + row * out_step, out_step)


@numba.njit(inline="always")
def weigh(
    weights: Any, at: Any, step: Any, rows: Any, x: Any, x_at: Any, x_step: Any, depth: Any, out: Any, wide: Any
) -> None:  # pragma: no cover - compiled
    """Add weights [rows, depth] times the rows of x, [depth, wide], to out [rows, wide]; WIDTH divides wide.

    step and x_step are the distances between rows of weights and of x; those of out are contiguous.
    """
    for i in range(0, wide, WIDTH):
        for row in range(0, rows, MOST_ROWS):
            a_at, c_at = at + row * step, row * wide + i
            weighed(rows - row, weights, a_at, step, x, x_at + i, x_step, depth, out, c_at, wide)
