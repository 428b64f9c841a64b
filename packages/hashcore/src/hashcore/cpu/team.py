"""Runs a compiled kernel on the threads of the OpenMP runtime that torch uses.

Between two operators torch's threads wait by spinning, for milliseconds, so a second set of threads competes with them
for the same cores: with two cores, a kernel on two threads of its own took longer than on one. These threads also start
within 20 us, and no Python runs on them, so nothing waits for the interpreter's lock.

A kernel gets its arguments through a record of 8-byte cells: counters, sizes and results (`_CELLS`), then the kernel's
arguments as numba passes them. A small LLVM function, the body that OpenMP runs on each thread, takes pieces by an
atomic counter, and calls the kernel's machine code. Surplus threads return at once.
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
from numba.core import serialize
from numba.core.compiler_lock import global_compiler_lock

Start = Callable[[int, int, int, int], None]
"""Address of a body, address of its record, number of threads, 0 -> returns when all threads have run the body."""

_BORN = os.getpid()
_CELLS = "=7q"
_MEMBERS, _LIMIT, _COUNTER, _TASKS, _PIECES, _ERROR, _RESULT, _ARGUMENTS = range(8)
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLAGS = 0x703  # of an array: C and Fortran order, alignment, whether it may be written; numba's type depends on them
_FINE = 0, -2  # what numba's functions return if they did not fail: a value, or None
_FORMS = {ir.DoubleType: "d", ir.FloatType: "f4x"}
_FORKED = 0x40  # PF_FORKNOEXEC of Linux


class _Body(NamedTuple):
    """Machine code for the threads of a team, and what it is made of, which must not be freed.

    Attributes:
        address: of the function; form: of a record's arguments, as in `struct`; owners: the compiled code.
    """

    address: int
    form: str
    owners: tuple[Any, ...]


_bodies: dict[tuple[Any, ...], _Body] = {}


def run(kernel: Any, tasks: int, threads: int, arguments: tuple[Any, ...]) -> int:
    """Run tasks [0, tasks) of a kernel that numba has compiled, on `threads` of at least as many threads of a team.

    All of torch's threads are started, because the runtime would end those that a smaller team leaves out.

    Returns: the results of all calls, combined by "or".
    Raises: what a call of the kernel raised, after the other threads are done.
    """
    start = runtime()
    assert start is not None, "ask `size` first"
    kinds, cells = [kernel], []
    _describe(arguments, kinds, cells)
    key = tuple(kinds)
    body = _bodies.get(key) or _bodies.setdefault(key, _body(kernel, arguments))
    # Several pieces per thread, for load balance.
    made = struct.pack(_CELLS + body.form, 0, threads, 0, tasks, min(tasks, 4 * threads), 0, 0, *cells)
    record = ctypes.create_string_buffer(made)
    start(body.address, ctypes.addressof(record), sys.modules["torch"].get_num_threads(), 0)
    *_, error, result = struct.unpack_from(_CELLS, record)
    if error:
        _raise(error, kernel)
    return result


def size() -> int:
    """Return the number of threads in the team of the calling thread; 1 if there is no team."""
    return 1 if runtime() is None else sys.modules["torch"].get_num_threads()


def runtime() -> Start | None:
    """Return the function that runs a body on torch's threads.

    Returns: None if torch is not loaded or uses other threads, or if this process was forked: threads are not copied.
    """
    torch: Any = sys.modules.get("torch")
    if getattr(torch, "__config__", None) is None or _is_forked(os.getpid()):
        return None
    return _start(torch)


@functools.cache
def _start(torch: Any) -> Start | None:
    """Find the function in the runtime that torch's own operators use."""
    folder = Path(str(torch.__file__)).parent / "lib"
    try:
        if "parallel backend: OpenMP" not in torch.__config__.parallel_info():
            return None
        # Loaded already; the names of the libraries that it depends on are found through it.
        library = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        start, most = library.GOMP_parallel, library.omp_get_max_threads
    except (OSError, AttributeError):
        return None
    start.restype, start.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return start if most() == torch.get_num_threads() else None  # else a second runtime was loaded before torch


@functools.lru_cache(maxsize=1)
def _is_forked(process: int) -> bool:
    """Whether this process is a fork of one in which torch may have started its threads.

    Compares with the process that imported this module, and asks Linux, because the fork may have been before that.
    """
    if process != _BORN:
        return True
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return bool(int(fields[6]) & _FORKED)
    except (OSError, IndexError, ValueError):
        return False  # no such file outside of Linux, where torch has other runtimes


def _raise(error: int, kernel: Any) -> None:
    """Raise the exception of a kernel; error: the address of numba's description of it, plus 1."""
    if error == 1:
        raise RuntimeError(f"the kernel {kernel.__name__} failed without an exception")
    at, length = struct.unpack("=qi", ctypes.string_at(error - 1, 12))
    kind, given, _ = serialize.loads(ctypes.string_at(at, length))
    raise kind(*(given or ()))


def _describe(arguments: tuple[Any, ...], kinds: list[Any], cells: list[Any]) -> None:
    """Append arguments to the cells of a record, and to `kinds` what is the same for arguments of the same types."""
    for x in arguments:
        if isinstance(x, np.ndarray):
            interface = x.__array_interface__
            cells += 0, 0, x.size, x.itemsize, interface["data"][0], *x.shape, *x.strides
            kinds += x.dtype, x.ndim, x.flags.num & _FLAGS
        elif isinstance(x, tuple):
            kinds.append(tuple)
            _describe(x, kinds, cells)
            kinds.append(None)
        else:
            cells.append(x)
            kinds.append(type(x))


def machine_code(kernel: Any, kinds: tuple[Any, ...]) -> tuple[Any, int]:
    """Compile a kernel for arguments of these numba types; return what numba made, and the machine code's address."""
    kernel.compile(kinds)
    made = kernel.overloads[kinds]
    return made, made.library.get_pointer_to_function(made.fndesc.llvm_func_name)


@global_compiler_lock
def _body(kernel: Any, arguments: tuple[Any, ...]) -> _Body:
    """Compile the body for a kernel and arguments of these types."""
    types = tuple(numba.typeof(x) for x in (0, 0, *arguments))
    made, address = machine_code(kernel, types)
    context, description = made.target_context, made.fndesc
    called = context.call_conv.get_function_type(description.restype, description.argtypes)
    module = ir.Module(f"team.{kernel.__name__}")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64.as_pointer()]), module.name)
    form = _emit(function, called, address)
    library = context.codegen().create_library(module.name)
    library.add_ir_module(module)
    library.finalize()
    return _Body(library.get_pointer_to_function(module.name), form, (made, library))


def _emit(function: ir.Function, called: ir.FunctionType, address: int) -> str:
    """Write the body: join the team, take pieces until none is left, and call the kernel at `address` for each.

    Returns: the form of the arguments' cells, as in `struct`.
    """
    entry, ready, take, work, end = (function.append_basic_block(name) for name in ("entry", *"abcd"))
    record, build = function.args[0], ir.IRBuilder(entry)

    def cell(number: int) -> Any:
        return build.gep(record, [_I64(number)])

    def count(number: int) -> Any:
        return build.atomic_rmw("add", cell(number), _I64(1), "monotonic")

    build.cbranch(build.icmp_signed("<", count(_MEMBERS), build.load(cell(_LIMIT))), ready, end)
    build.position_at_end(ready)
    tasks, pieces = build.load(cell(_TASKS)), build.load(cell(_PIECES))
    result, error = build.alloca(_I64), build.alloca(_I64)
    given = [_argument(build, cell(_ARGUMENTS + at), kind) for at, kind in enumerate(called.args[4:])]
    kernel = build.inttoptr(_I64(address), called.as_pointer())
    build.branch(take)
    build.position_at_end(take)
    piece = count(_COUNTER)
    build.cbranch(build.icmp_signed("<", piece, pieces), work, end)
    build.position_at_end(work)
    edges = [build.sdiv(build.mul(tasks, x), pieces) for x in (piece, build.add(piece, _I64(1)))]
    build.store(_I64(0), result)
    build.store(_I64(0), error)
    slots = [build.bitcast(slot, kind) for slot, kind in zip((result, error), called.args[:2], strict=True)]
    status = build.call(kernel, [*slots, *edges, *given])
    wrong = functools.reduce(build.and_, [build.icmp_signed("!=", status, _I32(code)) for code in _FINE])
    described = build.select(wrong, build.or_(build.load(error), _I64(1)), _I64(0))  # addresses are even
    build.atomic_rmw("umax", cell(_ERROR), described, "monotonic")
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
