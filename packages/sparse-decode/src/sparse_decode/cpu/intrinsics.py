"""LLVM operations that numba does not expose."""

# llvmlite is untyped.
# pyright: reportAttributeAccessIssue=false

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def prefetch(typing_context: Any, x: Any, at: Any) -> Any:
    """Prefetch the cache line of x[at]; x is a contiguous one-dimensional array."""
    if x.layout != "C" or x.ndim != 1:
        raise TypeError(f"expected a contiguous one-dimensional array, got {x}")

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        line = builder.bitcast(builder.gep(data, [values[1]]), pointer)
        read, keep_near, data_not_code = (ir.Constant(number, n) for n in (0, 3, 1))
        builder.call(function, [line, read, keep_near, data_not_code])
        return context.get_dummy_value()

    return types.void(x, types.intp), emit
