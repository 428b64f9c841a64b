"""SIMD operations on LANES numbers for numba: products of rows, exponentials and maxima of lines of logits; atomics.

For such loops LLVM's auto-vectoriser would sum within vectors, which takes longer than the products, or use narrower
registers. LLVM splits vectors of LANES numbers into the
registers of the CPU. Arrays are contiguous and one-dimensional; offsets and steps count elements and are not checked.
Sums have one order, whatever calls them.
"""

# llvmlite and numba are untyped.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from hashcore.cpu.parts import inner
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
LEAST, MOST = -127 * math.log(2), 128 * math.log(2)
"""Smallest and largest argument of an exponential: exponent bits 0, which is 0, and 255, infinity."""
BLOCK = 64
"""Numbers of a line to compare at once, and tokens of a tile of bfloat16."""
VECTORS = BLOCK // LANES
"""Vectors of a tile's row: with MOST_ROWS lines, half of the registers hold sums."""
LOWEST = np.float32(-2e38)
"""Below any logit: what to subtract from -inf and NaN, so that these stay."""
WORD = ir.IntType(32)
_INDEX = ir.IntType(64)
FLOATS, WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(WORD, LANES)


class Code:
    """Emits the code of an intrinsic: LLVM's builder, with vectors at offsets of arrays, and sums of offsets."""

    def __init__(self, builder: Any):
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def sum(self, *terms: Any) -> Any:
        """Return the sum of offsets, or of integers known now."""
        return functools.reduce(self.add, map(offset, terms))

    def times(self, a: Any, b: Any) -> Any:
        return self.mul(offset(a), offset(b))

    def loop(self, count: Any, step: int = 1) -> Any:
        """Emit a loop of count // step turns."""
        turns = self.udiv(count, offset(step)) if step > 1 else count
        return cgutils.for_range(self._builder, turns, intp=_INDEX)

    def at(self, x: Any, place: Any, kind: Any = FLOATS) -> Any:
        """Return a pointer to the vector of this kind that starts at an element."""
        return self.bitcast(self.gep(x, [place]), kind.as_pointer())

    def read(self, x: Any, place: Any, kind: Any = FLOATS) -> Any:
        """Load a vector, which may begin at any word of 16 bits."""
        return self.load(self.at(x, place, kind), align=4 if kind is FLOATS else 2)

    def write(self, vector: Any, x: Any, place: Any) -> None:
        self.store(vector, self.at(x, place, vector.type), align=4)

    def element(self, x: Any, place: Any, kind: Any = FLOATS) -> Any:
        """Return a vector that holds an element of x in each lane."""
        return self.spread(self.load(self.gep(x, [place])), kind)

    def spread(self, number: Any, kind: Any = FLOATS) -> Any:
        """Return a vector that holds a number in each lane."""
        undefined = ir.Constant(kind, ir.Undefined)
        one = self.insert_element(undefined, number, ir.Constant(WORD, 0))
        return self.shuffle_vector(one, undefined, ir.Constant(WORDS, [0] * LANES))

    def held(self, value: Any) -> Any:
        """Return the place of a variable with a value."""
        return cgutils.alloca_once_value(self._builder, value)

    def instruct(self, name: str, returns: Any, *given: Any) -> Any:
        """Call an intrinsic of LLVM."""
        kind = ir.FunctionType(returns, [x.type for x in given])
        return self.call(cgutils.get_or_insert_function(self.module, kind, f"llvm.{name}"), given)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """Return a b + c."""
        return self.instruct(f"fmuladd.v{LANES}f32", FLOATS, a, b, c)

    def shuffled(self, a: Any, b: Any, lanes: list[int]) -> Any:
        """Return the vector of these lanes of two vectors, those of the second counted behind the first's."""
        return self.shuffle_vector(a, b, ir.Constant(ir.VectorType(WORD, len(lanes)), lanes))

    def joined(self, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
        """Join the lanes of a vector to one number: lane i with lane i + 8, then i + 4, and so on."""
        half = LANES // 2
        while half:
            lanes = [(lane + half) % LANES for lane in range(LANES)]
            vector, half = join(vector, self.shuffled(vector, ir.Constant(FLOATS, ir.Undefined), lanes)), half // 2
        return self.extract_element(vector, ir.Constant(WORD, 0))

    def prefetch(self, x: Any, place: Any, level: int) -> None:
        """Prefetch the cache line of an element; level: 3 for all caches, 2 for L2."""
        read, is_data = 0, 1
        how = [ir.Constant(WORD, n) for n in (read, level, is_data)]
        self.instruct("prefetch.p0", ir.VoidType(), self.at(x, place, ir.IntType(8)), *how)

    def by_rows(self, rows: Any, emit: Callable[[int], None]) -> None:
        """Emit code for each number of rows up to MOST_ROWS; that of `rows` runs, or of MOST_ROWS if they are more."""
        most = offset(MOST_ROWS)
        rows = self.select(self.icmp_signed("<", rows, most), rows, most)
        for count in range(1, MOST_ROWS + 1):
            with self.if_then(self.icmp_signed("==", rows, offset(count))):
                emit(count)


def offset(x: Any) -> Any:
    """Return an offset, also of an integer known now."""
    return ir.Constant(_INDEX, x) if isinstance(x, int) else x


def all_lanes(number: float) -> Any:
    """Return a vector that holds a number known now in each lane."""
    return ir.Constant(FLOATS, [number] * LANES)


def emitted(returns: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function that emits its code, given `Code`, and of arrays a pointer to the first element.

    Integers become offsets, and floats float32.
    """

    def made(emit: Callable[..., Any]) -> Any:
        def typed(typing_context: Any, *given: Any) -> Any:
            if any(isinstance(kind, types.Array) and (kind.layout != "C" or kind.ndim != 1) for kind in given):
                raise TypeError(f"expected contiguous one-dimensional arrays, got {given}")
            kinds = [types.intp if isinstance(kind, types.Integer) else kind for kind in given]
            kinds = [types.float32 if isinstance(kind, types.Float) else kind for kind in kinds]

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                data = [
                    context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
                    for kind, value in zip(kinds, values, strict=True)
                ]
                found = emit(Code(builder), *data)
                return context.get_dummy_value() if returns is types.void else found

            return returns(*kinds), generate

        wanted = list(inspect.signature(emit).parameters.values())
        context = inspect.Parameter("typing_context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        typed.__signature__ = inspect.Signature([context, *wanted[1:]])  # numba asks how many arguments there are
        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(typed)

    return made


@emitted()
def prefetch(code: Code, x: Any, at: Any) -> None:
    """Prefetch the cache line of x[at]."""
    code.prefetch(x, at, 3)


@emitted()
def publish(code: Code, x: Any, at: Any, value: Any) -> None:
    """Write x[at] = value so that a thread that `observe`s it sees all that was written before; x is int64 [n]."""
    code.store_atomic(value, code.gep(x, [at]), "release", 8)


@emitted(types.int64)
def observe(code: Code, x: Any, at: Any) -> Any:
    """Read x[at], which another thread may `publish`; x is int64 [n]."""
    return code.load_atomic(code.gep(x, [at]), "acquire", 8)


# ---- Products --------------------------------------------------------------------------------------------------------


def _wide(code: Code, x: Any, at: Any) -> list[Any]:
    """Load WIDTH numbers of a row as two vectors of float32; words of 16 bits are bfloat16, its upper half."""
    places = [code.sum(at, half) for half in (0, LANES)]
    if x.type.pointee != ir.IntType(16):
        return [code.read(x, place) for place in places]
    words = [code.zext(code.read(x, place, ir.VectorType(ir.IntType(16), LANES)), WORDS) for place in places]
    return [code.bitcast(code.shl(word, ir.Constant(WORDS, [16] * LANES)), FLOATS) for word in words]


@emitted()
def weighed(
    code: Code, rows: Any, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, b_step: Any, depth: Any, c: Any,
    c_at: Any, c_step: Any,
) -> None:  # fmt: skip
    """Add A [up to MOST_ROWS rows, depth] B [depth, WIDTH] to C [rows, WIDTH], in the order of depth.

    A matrix is an array, the element that starts its first row, and the distance of rows.
    """

    def emit(count: int) -> None:
        cells = [(row, half) for row in range(count) for half in range(2)]
        places = {(row, half): code.sum(c_at, code.times(c_step, row), half * LANES) for row, half in cells}
        sums = {cell: code.held(code.read(c, places[cell])) for cell in cells}
        with code.loop(depth) as loop:
            lines = _wide(code, b, code.sum(b_at, code.times(b_step, loop.index)))
            for row in range(count):
                factor = code.element(a, code.sum(a_at, code.times(a_step, row), loop.index))
                for half in range(2):
                    total = code.fused(factor, lines[half], code.load(sums[row, half]))
                    code.store(total, sums[row, half])
        for cell in cells:
            code.write(code.load(sums[cell]), c, places[cell])

    code.by_rows(rows, emit)


def _lanes(*lanes: int) -> list[int]:
    """Return the shuffle mask that takes these lanes (0-3: of the first vector, 4-7) of each group of four."""
    return [4 * four + lane % 4 + LANES * (lane > 3) for four in range(LANES // 4) for lane in lanes]


def _fours(*fours: int) -> list[int]:
    """Return the shuffle mask that takes these groups of four lanes of a pair of vectors."""
    return [4 * four + lane for four in fours for lane in range(4)]


def _summed(code: Code, vectors: list[Any]) -> Any:
    """Return the vector of the sums of LANES vectors: in each of four rounds, pairs of vectors become one vector."""
    for sides in (
        (_lanes(0, 4, 1, 5), _lanes(2, 6, 3, 7)),
        (_lanes(0, 1, 4, 5), _lanes(2, 3, 6, 7)),
        (_fours(0, 1, 4, 5), _fours(2, 3, 6, 7)),
        (_fours(0, 2, 4, 6), _fours(1, 3, 5, 7)),
    ):
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
        vectors = [code.fadd(*(code.shuffled(*pair, side) for side in sides)) for pair in pairs]
    return vectors[0]


@emitted()
def dots(
    code: Code, rows: Any, a: Any, a_at: Any, a_step: Any, x: Any, x_at: Any, x_step: Any, width: Any, c: Any,
    c_at: Any, c_step: Any,
) -> None:  # fmt: skip
    """Write C [rows, TOKENS] = A [up to MOST_ROWS rows, width] X [TOKENS, width]^T; WIDTH divides width."""

    def emit(count: int) -> None:
        cells = [(row, t) for row in range(count) for t in range(TOKENS)]
        sums = {cell: code.held(all_lanes(0)) for cell in cells}
        with code.loop(width, WIDTH) as loop:
            i = code.times(loop.index, WIDTH)
            keys = [_wide(code, x, code.sum(x_at, code.times(x_step, token), i)) for token in range(TOKENS)]
            for row in range(count):
                query = _wide(code, a, code.sum(a_at, code.times(a_step, row), i))
                for token in range(TOKENS):
                    total = code.load(sums[row, token])
                    for half in range(2):
                        total = code.fused(query[half], keys[token][half], total)
                    code.store(total, sums[row, token])
        undefined = ir.Constant(FLOATS, ir.Undefined)
        found = _summed(code, [code.load(sums[cell]) for cell in cells] + [undefined] * (LANES - len(cells)))
        for row in range(count):
            line = code.shuffled(found, undefined, [TOKENS * row + i for i in range(TOKENS)])
            code.write(line, c, code.sum(c_at, code.times(c_step, row)))

    code.by_rows(rows, emit)


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


# ---- Lines of logits: `count` numbers from `at` on, a multiple of LANES, of BLOCK for `largest` ----------------------


def _exp(code: Code, y: Any) -> Any:
    """Return exp(y) to a relative error of 2e-7; NaN stays NaN, subnormal results become 0, those above 2^127.5 inf.

    exp(y) = 2^n exp(r), n = round(y / log 2): a polynomial of degree 7, and n added to the exponent. log 2 is the sum
    of two constants, the first of which has few bits, so that n times it is exact.
    """
    y = code.select(code.fcmp_ordered("<", y, all_lanes(LEAST)), all_lanes(LEAST), y)
    below = code.select(code.fcmp_ordered("<", y, all_lanes(MOST)), y, all_lanes(MOST))  # n must be an integer
    n = code.instruct(f"floor.v{LANES}f32", FLOATS, code.fused(below, all_lanes(1 / math.log(2)), all_lanes(0.5)))
    r = code.fused(n, all_lanes(-0.693359375), y)
    r = code.fused(n, all_lanes(2.12194440e-4), r)
    p = all_lanes(1.0 / math.factorial(7))
    for i in range(6, -1, -1):
        p = code.fused(p, r, all_lanes(1.0 / math.factorial(i)))
    whole = code.add(code.fptosi(n, WORDS), ir.Constant(WORDS, [127] * LANES))
    return code.fmul(p, code.bitcast(code.shl(whole, ir.Constant(WORDS, [23] * LANES)), FLOATS))


@emitted(types.float32)
def _exponentials(code: Code, x: Any, at: Any, count: Any, top: Any) -> Any:
    most, total = code.spread(top), code.held(all_lanes(0))
    with code.loop(count, LANES) as loop:
        place = code.sum(at, code.times(loop.index, LANES))
        found = _exp(code, code.fsub(code.read(x, place), most))
        code.write(found, x, place)
        code.store(code.fadd(code.load(total), found), total)
    return code.joined(code.load(total), code.fadd)


def larger(code: Code, a: Any, b: Any) -> Any:
    """Return the larger numbers of two vectors; those of `a` where b is NaN."""
    return code.select(code.fcmp_ordered(">", b, a), b, a)


@emitted(types.float32)
def _largest(code: Code, x: Any, at: Any, count: Any) -> Any:
    most = [code.held(all_lanes(-math.inf)) for _ in range(VECTORS)]
    with code.loop(count, BLOCK) as loop:
        for i, held in enumerate(most):
            line = code.read(x, code.sum(at, code.times(loop.index, BLOCK), LANES * i))
            code.store(larger(code, code.load(held), line), held)
    join = functools.partial(larger, code)
    return code.joined(functools.reduce(join, [code.load(held) for held in most]), join)


# Functions of their own, not inlined by numba: fastmath of a caller would change the order of sums.
@inner
def exponentials(x: Any, at: Any, count: Any, top: Any) -> Any:  # pragma: no cover - compiled
    """Replace numbers by exp(x - top), x <= top, to a relative error of 2e-7; return their sum. -inf becomes 0."""
    return _exponentials(x, at, count, top)


@inner
def largest(x: Any, at: Any, count: Any) -> Any:  # pragma: no cover - compiled
    """Return the largest number that is not NaN; -inf without numbers. BLOCK divides count."""
    return _largest(x, at, count)


@inner(fastmath={"reassoc", "contract", "nsz"})
def cap(x: Any, at: Any, count: Any, softcap: Any, spare: Any) -> None:  # pragma: no cover - compiled
    """Replace x by softcap tanh(x / softcap), to 1e-6 of softcap: tanh |y| = (1 - e) / (1 + e), e = exp(-2 |y|).

    spare: space for count numbers.
    """
    line, small = x[at : at + count], spare[:count]
    for j in range(count):
        small[j] = -abs(line[j]) * (np.float32(2) / softcap)
    exponentials(small, 0, count, np.float32(0))
    for j in range(count):
        line[j] = np.sign(line[j]) * softcap * (np.float32(1) - small[j]) / (np.float32(1) + small[j])


@numba.njit(inline="always")
def extent(bounds):  # pragma: no cover - compiled
    """Return [low, high) of the tokens that any of the rows sees, and [first, last) of those that all see."""
    low, high, first, last = bounds[0, 0], bounds[0, 1], bounds[0, 0], bounds[0, 1]
    for r in range(1, len(bounds)):
        low, high = min(low, bounds[r, 0]), max(high, bounds[r, 1])
        first, last = max(first, bounds[r, 0]), min(last, bounds[r, 1])
    return low, high, first, last


@numba.njit(inline="always")
def hide(logits, at, size, start, end):  # pragma: no cover - compiled
    """Set the logits of `size` tokens outside [start, end) to -inf."""
    for j in range(max(0, min(size, start))):
        logits[at + j] = np.float32(-np.inf)
    for j in range(max(0, min(size, end)), size):
        logits[at + j] = np.float32(-np.inf)
