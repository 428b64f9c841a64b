"""Runs a compiled kernel on the threads of the OpenMP runtime that torch uses.

Between two operators torch's threads wait by spinning, for milliseconds, so a second set of threads competes with them
for the same cores: with two cores, a kernel on two threads of its own took longer than on one. These threads also start
within a microsecond, and no Python runs on them, so nothing waits for the interpreter's lock.

A kernel gets its arguments through a record of 8-byte cells: the counter of pieces, the numbers of tasks and pieces, the
first error, the results, then the kernel's arguments as numba passes them. A small LLVM function, the body that OpenMP
runs on each thread, takes pieces by an atomic counter, and calls the kernel's machine code.
"""

# numba and llvmlite are untyped.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import ctypes
import functools
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core.compiler_lock import global_compiler_lock

_BORN = os.getpid()
_COUNTER, _TASKS, _PIECES, _ERROR, _RESULT, _ARGUMENTS = range(6)  # cells of a record
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLAGS = 0x703  # of an array: C and Fortran order, alignment, whether it may be written; numba's type depends on them
_FINE = 0, -2  # what numba's functions return if they did not fail: a value, or None
_FORMS = {ir.DoubleType: "d", ir.FloatType: "f4x"}


class _Body(NamedTuple):
    """Machine code for the threads of a team, and what it is made of, which must not be freed.

    Attributes:
        address: of the function; form: of a record's arguments, as in `struct`; owners: the compiled code.
    """

    address: int
    form: str
    owners: tuple[Any, ...]


_bodies: dict[tuple[Any, ...], _Body] = {}


def run(kernel: Any, tasks: int, threads: int, arguments: tuple[Any, ...]) -> list[Any] | None:
    """Run tasks [0, tasks) of a kernel that numba has compiled; return its results, combined by "or".

    All of torch's threads are asked, because the runtime ends those that a smaller team leaves out; with fewer pieces
    than threads, some find nothing to do.

    Args: threads: how many the work justifies.
    Returns: None, and nothing has run, if there is no team.
    Raises: RuntimeError if the kernel failed, for example for want of memory.
    """
    start = runtime()
    if start is None:
        return None
    key, cells = (kernel,), []
    for argument in arguments:
        key += _cells(argument, cells)
    body = _bodies.get(key) or _bodies.setdefault(key, _body(kernel, arguments))
    record = ctypes.create_string_buffer(
        struct.pack("=5q" + body.form, 0, tasks, min(tasks, 4 * threads), 0, 0, *cells)
    )
    start(body.address, ctypes.addressof(record), sys.modules["torch"].get_num_threads(), 0)
    *_, error, result = struct.unpack_from("=5q", record)
    if error:
        raise RuntimeError(f"the kernel {kernel.__name__} failed; is there enough memory?")
    return [result]


def runtime() -> Callable[[int, int, int, int], None] | None:
    """Return the function that runs a body on torch's threads.

    Returns: None if torch is not loaded or uses another runtime, or if this process was forked: threads are not copied.
    """
    return _start() if "torch" in sys.modules and os.getpid() == _BORN else None


@functools.cache
def _start() -> Callable[[int, int, int, int], None] | None:
    folder = Path(str(sys.modules["torch"].__file__)).parent / "lib"
    try:
        library = ctypes.CDLL(str(folder / "libtorch_cpu.so"))  # loaded already; looks through what it depends on, too
        start = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    start.restype, start.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return start


def _cells(argument: Any, cells: list[Any]) -> tuple[Any, ...]:
    """Append an argument to the cells of a record; return a key that is the same for arguments of the same type."""
    if isinstance(argument, np.ndarray):
        interface = argument.__array_interface__
        cells += 0, 0, argument.size, argument.itemsize, interface["data"][0], *argument.shape, *argument.strides
        return argument.dtype, argument.ndim, argument.flags.num & _FLAGS
    if isinstance(argument, tuple):
        return tuple, *(part for each in argument for part in _cells(each, cells)), None
    cells.append(argument)
    return (type(argument),)


@global_compiler_lock
def _body(kernel: Any, arguments: tuple[Any, ...]) -> _Body:
    """Compile the body for a kernel and arguments of these types."""
    types = tuple(numba.typeof(x) for x in (0, 0, *arguments))
    kernel.compile(types)
    made = kernel.overloads[types]
    context, description = made.target_context, made.fndesc
    address = made.library.get_pointer_to_function(description.llvm_func_name)
    called = context.call_conv.get_function_type(description.restype, description.argtypes)
    module = ir.Module(f"team.{kernel.__name__}")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64.as_pointer()]), module.name)
    form = _emit(function, called, address)
    library = context.codegen().create_library(module.name)
    library.add_ir_module(module)
    library.finalize()
    return _Body(library.get_pointer_to_function(module.name), form, (made, library))


def _emit(function: ir.Function, called: ir.FunctionType, address: int) -> str:
    """Write the body: take pieces until none is left, and call the kernel at `address` for each.

    Returns: the form of the arguments' cells, as in `struct`.
    """
    entry, take, work, end = (function.append_basic_block(name) for name in ("entry", "take", "work", "end"))
    record, build = function.args[0], ir.IRBuilder(entry)

    def cell(number: int) -> Any:
        return build.gep(record, [_I64(number)])

    tasks, pieces = build.load(cell(_TASKS)), build.load(cell(_PIECES))
    result, error = build.alloca(_I64), build.alloca(_I64)
    given = [_argument(build, cell(_ARGUMENTS + at), kind) for at, kind in enumerate(called.args[4:])]
    kernel = build.inttoptr(_I64(address), called.as_pointer())
    build.branch(take)
    build.position_at_end(take)
    piece = build.atomic_rmw("add", cell(_COUNTER), _I64(1), "monotonic")
    build.cbranch(build.icmp_signed("<", piece, pieces), work, end)
    build.position_at_end(work)
    edges = [build.sdiv(build.mul(tasks, x), pieces) for x in (piece, build.add(piece, _I64(1)))]
    build.store(_I64(0), result)
    slots = [build.bitcast(slot, kind) for slot, kind in zip((result, error), called.args[:2], strict=True)]
    status = build.call(kernel, [*slots, *edges, *given])
    wrong = functools.reduce(build.and_, [build.icmp_signed("!=", status, _I32(code)) for code in _FINE])
    build.atomic_rmw("or", cell(_ERROR), build.zext(wrong, _I64), "monotonic")
    build.atomic_rmw("or", cell(_RESULT), build.load(result), "monotonic")
    build.branch(take)
    build.position_at_end(end)
    build.ret_void()
    return "".join(_FORMS.get(type(kind), "q") for kind in called.args[4:])


def _argument(build: ir.IRBuilder, cell: Any, kind: Any) -> Any:
    """Read one argument of the kernel from its cell."""
    if isinstance(kind, (ir.FloatType, ir.DoubleType)):
        return build.load(build.bitcast(cell, kind.as_pointer()))
    number = build.load(cell)
    if isinstance(kind, ir.PointerType):
        return build.inttoptr(number, kind)
    return number if kind.width == 64 else build.trunc(number, kind)
