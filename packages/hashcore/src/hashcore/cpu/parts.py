"""Compiles the functions that kernels are made of: to LLVM's code only, which is linked into the kernels.

By default numba optimises each function that it compiles with all that it calls, makes machine code of it, and wrappers
for calls from Python and C. A part is called by kernels only, into which its code is linked before it is optimised.
"""

# numba is untyped.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import functools
from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _Optimised(JITCodeLibrary):
    """Code that is linked into other code and never runs by itself."""

    codegen: Any = property(lambda self: self)  # numba asks it to `set_env`

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: Python objects are the kernel's business."""

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: there is no machine code."""
        self._ensure_finalized()
        return 0

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


class _Plain(_Optimised):
    def _optimize_final_module(self) -> None:
        pass


class _HotCompiler(Compiler):
    library: type[_Optimised] = _Optimised

    def define_pipelines(self) -> Any:
        self.state.library = self.library(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return super().define_pipelines()


class _Compiler(_HotCompiler):
    library = _Plain


_WITHOUT = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner: Any = functools.partial(numba.njit, pipeline_class=_Compiler, **_WITHOUT)
"""Compiles a part of kernels; used like `numba.njit`."""
hot: Any = functools.partial(numba.njit, pipeline_class=_HotCompiler, **_WITHOUT)
"""The same for a part with an inner loop: it is optimised by itself, too, which makes some up to a sixth faster."""


@inner
def copy(source: Any, to: Any) -> None:  # pragma: no cover - compiled
    """Write `to`[: len(source)]; for the error message of a slice assignment numba would compile ten functions."""
    for i in range(len(source)):
        to[i] = source[i]
