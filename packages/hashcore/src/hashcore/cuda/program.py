"""Compiles kernel sources to cubins with NVRTC through cuda-core, and caches them on disk."""

import functools
import importlib
import io
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashcore.cuda.source import HASHCORE_KERNELS, Macros, read_source

logger: logging.Logger = logging.getLogger(__name__)
CACHE_BYTES = 256 << 20


def cache_folder() -> Path:
    """Return the folder for compiled kernels: HASHCORE_CACHE, or hashcore in the user's cache folder."""
    if chosen := os.environ.get("HASHCORE_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hashcore"


class CompileError(RuntimeError):
    """NVRTC could not compile a source; the message has the kernel, the architecture and the compiler's message."""


@dataclass(init=False, unsafe_hash=True)
class Program:
    """One kernel file with its macros.

    Args:
        name: file name of the source.
        macros: definitions (-D) of shapes and dtypes that change the code.
        folder: the folder of the source, by default hashcore's kernels. Quoted includes are searched there and among
            hashcore's kernels (cuda.source), so that other packages can include "common.cuh".

    Programs with equal arguments are equal and have the same hash.
    """

    name: str
    macros: tuple[tuple[str, str], ...]
    folder: Path

    def __init__(self, name: str, macros: Macros | None = None, folder: Path = HASHCORE_KERNELS):
        self.name, self.folder = name, folder
        self.macros = tuple(sorted((key, str(value)) for key, value in (macros or {}).items()))

    def __str__(self) -> str:
        return " ".join([self.name, *(f"-D{key}={value}" for key, value in self.macros)])

    def cubin(self, arch: str) -> bytes:
        """Return machine code for an architecture such as sm_90a, from the disk cache if possible.

        The cache key covers the source with its headers, the macros and all other options, the architecture, and the
        version of NVRTC. If the cache folder cannot be written, this is logged once and nothing is cached.

        Raises: CompileError.
        """
        key, cuda_core = self.cache_key(arch), _cuda_core("cuda.core.utils")
        try:
            with cuda_core.FileStreamProgramCache(cache_folder() / "cubin", max_size_bytes=CACHE_BYTES) as cache:
                found: bytes | None = cache.get(key)
                if found is not None:
                    return found
                code, _ = self.compile(arch)
                cache[key] = code
                return code
        except OSError as error:
            _report_cache(str(error))
            return self.compile(arch)[0]

    def cache_key(self, arch: str) -> bytes:
        """Return the cache key of the cubin."""
        return _cuda_core("cuda.core.utils").make_program_cache_key(
            code=self.source(), code_type="c++", options=self._options(arch, ()), target_type="cubin"
        )

    def compile(self, arch: str, ptxas: Sequence[str] = ()) -> tuple[bytes, str]:
        """Compile; return the cubin and the compiler's log.

        Args:
            ptxas: options of the assembler, such as -v.
        Raises: CompileError.
        """
        compiler, log = _cuda_core("cuda.core").Program, io.StringIO()
        try:
            compiled = compiler(self.source(), "c++", options=self._options(arch, ptxas)).compile("cubin", logs=log)
        except Exception as error:  # cuda-core's own class for this has no public name
            if type(error).__name__ != "NVRTCError":
                raise
            raise CompileError(f"NVRTC refused {self} for {arch}:\n{error}") from error
        return bytes(compiled.code), log.getvalue()

    def source(self) -> str:
        """Return the text that is compiled."""
        return read_source(self.folder, self.name)

    def _options(self, arch: str, ptxas: Sequence[str]) -> Any:
        return _cuda_core("cuda.core").ProgramOptions(
            name=self.name,
            arch=arch,
            std="c++17",
            define_macro=list(self.macros) or None,
            ptxas_options=list(ptxas) or None,
        )


def require_compiler() -> None:
    """Raise ValueError if the kernels cannot be compiled because cuda-core is not installed."""
    _cuda_core("cuda.core")


def _cuda_core(module: str) -> Any:
    """Import a module of cuda-core, which the extra `cuda` installs; it has no types."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"hashcore needs cuda-core to compile its CUDA kernels, and it is not installed ({error}); "
            'pip install "cuda-core>=1.0,<2" "cuda-bindings>=13.0,<14", or use the CPU'
        ) from error


@functools.cache
def _report_cache(error: str) -> None:
    logger.warning("cubins are compiled again in every process: %s; set HASHCORE_CACHE to a writeable folder", error)
