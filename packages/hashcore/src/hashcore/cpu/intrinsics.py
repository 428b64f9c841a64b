"""The machine operations that numba has no name for."""

# llvmlite is untyped.
# pyright: reportAttributeAccessIssue=false

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 64  # scores compared at once: their mask is one 64-bit word


@intrinsic
def popcount(typing_context: Any, x: Any) -> Any:
    """Count the set bits of an unsigned integer; LLVM makes it vpopcntq or what the machine has."""
    return x(x), lambda context, builder, signature, values: builder.ctpop(values[0])


@intrinsic
def lowest_bit(typing_context: Any, x: Any) -> Any:
    """Return the position of the lowest set bit of a non-zero integer."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.cttz(values[0], context.get_constant(types.boolean, True))

    return x(x), emit


@intrinsic
def at_least(typing_context: Any, x: Any, start: Any, threshold: Any) -> Any:
    """Return a mask of which of x[start : start + 64] are at or above a threshold of the same integer type.

    One comparison and one mask move per 64 bytes with AVX-512. Left to itself LLVM widens every score to 64 bits to
    shift it into place, eight times the work.
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
        undefined = ir.Constant(vector, ir.Undefined)
        single = builder.insert_element(undefined, limit, ir.Constant(ir.IntType(32), 0))
        every = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        limits = builder.shuffle_vector(single, undefined, every)
        return builder.bitcast(getattr(builder, compare)(">=", block, limits), ir.IntType(LANES))

    return types.uint64(x, types.intp, threshold), emit


@numba.njit
def memory(address, size, like):
    """View size items of memory at an address as an array of the dtype of like."""
    return numba.carray(_pointer(address), (size,), like.dtype)


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), emit
