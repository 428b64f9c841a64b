"""Lets a kernel call other kernels at their addresses: they are compiled once, whatever calls them."""

# llvmlite and numba are untyped.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hashcore.cpu.team import machine_code
from hashcore.cpu.threads import compiled

Kinds = tuple[Any, ...]
"""numba's types of a kernel's arguments."""


def address(kernel: Callable[..., Any], kinds: Kinds) -> int:
    """Return the address of a kernel's machine code for arguments of these types; compile it at first use."""
    return machine_code(compiled(kernel), kinds)[1]


def caller(kinds: Kinds) -> Any:
    """Return a function for kernels, (address, arguments as a tuple) -> result, that calls a kernel of these types.

    The result is an int64, and means nothing if the kernel returns none.
    """

    @intrinsic
    def call(typing_context: Any, address: Any, arguments: Any) -> Any:
        given = types.unliteral(arguments)
        if tuple(given) != kinds:
            raise TypeError(f"expected arguments {kinds}, got {tuple(given)}")
        result = types.int64

        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            convention = context.call_conv
            kind: ir.Type = convention.get_function_type(result, kinds).as_pointer()
            kernel, unpacked = builder.inttoptr(values[0], kind), cgutils.unpack_tuple(builder, values[1])
            status, found = convention.call_function(builder, kernel, result, kinds, unpacked)
            with cgutils.if_unlikely(builder, status.is_error):
                convention.return_status_propagate(builder, status)
            return found

        return result(types.int64, given), emit

    return call
