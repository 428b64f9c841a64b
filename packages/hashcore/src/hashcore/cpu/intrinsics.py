"""LLVM operations that numba does not expose: memory by address, a few instructions.

All addresses are int64 and need only the alignment of 32-bit words.
"""

# llvmlite is untyped.
# pyright: reportAttributeAccessIssue=false

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hashcore.cpu.parts import inner

LANES = 64  # scores per comparison, whose mask is one 64-bit word

WORD: Any = ir.IntType(64)
HALF: Any = ir.IntType(32)
BYTE: Any = ir.IntType(8)
POSITION = types.int64


@inner
def memory(address: Any, size: Any, like: Any) -> Any:
    """View `size` elements at an address as an array of like's dtype."""
    # numba is untyped: it adds the context argument
    return numba.carray(pointer(address), (size,), like.dtype)  # pyright: ignore[reportCallIssue, reportPrivateImportUsage]


@intrinsic
def pointer(typing_context: Any, address: Any):
    """Convert an address to the pointer that `numba.carray` needs."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(POSITION), emit


@intrinsic
def word_at(typing_context: Any, address: Any):
    """Return the 32-bit word at an address."""
    return types.uint32(POSITION), lambda context, builder, signature, values: _load(builder, values[0], HALF)


@intrinsic
def at_least(typing_context: Any, x: Any, start: Any, threshold: Any):
    """Return a mask of the elements of x[start : start + 64] at or above a threshold of the same integer type.

    With AVX-512, this is one comparison and one mask move per 64 bytes. Auto-vectorised code would widen every score to
    64 bits to shift it into place, which is eight times the work.
    """
    if x.layout != "C" or x.dtype != threshold:
        raise TypeError(f"expected a contiguous array and a threshold of its type, got {x} and {threshold}")
    bits, compare = x.dtype.bitwidth, "icmp_signed" if x.dtype.signed else "icmp_unsigned"

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, first, limit = values
        data = context.make_array(signature.args[0])(context, builder, array).data
        vector = ir.VectorType(ir.IntType(bits), LANES)
        block = builder.load(builder.bitcast(builder.gep(data, [first]), vector.as_pointer()))
        block.align = bits // 8
        return builder.bitcast(getattr(builder, compare)(">=", block, _splat(builder, limit, LANES)), WORD)

    return types.uint64(x, types.intp, threshold), emit


@intrinsic
def popcount(typing_context: Any, x: Any):
    """Count the set bits of an unsigned integer."""
    return x(x), lambda context, builder, signature, values: builder.ctpop(values[0])


@intrinsic
def lowest_bit(typing_context: Any, x: Any):
    """Return the position of the lowest set bit of a non-zero integer."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.cttz(values[0], context.get_constant(types.boolean, True))

    return x(x), emit


def _prefetcher(level: int) -> Any:
    @intrinsic
    def prefetch(typing_context: Any, address: Any):
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _prefetch(builder, values[0], level)
            return context.get_dummy_value()

        return types.void(POSITION), emit

    return prefetch


prefetch, prefetch_far = _prefetcher(3), _prefetcher(2)
"""Prefetch the cache line at an address, which need not be valid; `prefetch_far` to L2 only."""


@intrinsic
def stay_a_function(typing_context: Any):
    """Prevent LLVM from inlining the numba function that calls this, which makes its callers compile much faster."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), emit


def _add(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, WORD(offset))


def _load(builder: Any, address: Any, kind: Any) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 4
    return value


def _indices(positions: Any) -> Any:
    return ir.Constant(ir.VectorType(HALF, len(positions)), list(positions))


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    nothing = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, value, HALF(0)), nothing, _indices([0] * lanes))


def _prefetch(builder: Any, address: Any, level: int = 3) -> None:
    byte = BYTE.as_pointer()
    function = ir.FunctionType(ir.VoidType(), [byte, HALF, HALF, HALF])
    read, levels, data = HALF(0), HALF(level), HALF(1)
    arguments = [builder.inttoptr(address, byte), read, levels, data]
    builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0"), arguments)
