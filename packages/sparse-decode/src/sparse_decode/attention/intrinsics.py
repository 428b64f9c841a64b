"""LLVM operations that numba does not expose."""

# llvmlite is untyped.
# pyright: reportAttributeAccessIssue=false

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Prefetch the cache line at an address, which need not be valid."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        read, keep_near, data_not_code = (ir.Constant(number, n) for n in (0, 3, 1))
        builder.call(function, [builder.inttoptr(values[0], pointer), read, keep_near, data_not_code])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """Convert an address to the pointer that `numba.carray` needs."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), emit
