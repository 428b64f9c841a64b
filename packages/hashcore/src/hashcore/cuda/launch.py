"""Launches on a device: cubins loaded once per device, arguments packed once, torch's current stream, no host sync."""

import functools
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hashcore.cuda.kernels import Launch
from hashcore.cuda.program import Program
from hashcore.cuda.source import HASHCORE_KERNELS

if TYPE_CHECKING:
    import torch

_loading = threading.Lock()


def run(launches: Iterable[Launch], device: "torch.device", folder: Path = HASHCORE_KERNELS) -> None:
    """Launch kernels one after the other on torch's current stream of a CUDA device.

    The first launch of a kernel compiles it, or reads it from the disk cache, and loads it: 1 to 300 ms, not allowed
    while a CUDA graph is captured. Later launches touch neither disk nor lock, and may be captured. If one of the
    kernels cannot be loaded, none is launched.

    Args:
        folder: where the launches' sources lie.
    Raises: CompileError; RuntimeError with the driver's words for what went wrong, or if a kernel would have to be
        loaded during a capture.
    """
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):  # cuLaunchKernel goes to the calling thread's current context
        _bind(index)
        stream = torch.cuda.current_stream(index).cuda_stream
        # All of them before the first is launched: one that cannot be loaded must not leave half a search behind.
        ready = [(_function(index, folder, one.source, one.macros, one.kernel), one) for one in launches]
        for function, one in ready:
            _launch(function, one, stream, one.programmatic and _starts_early(index))


def processors(device: "torch.device") -> int:
    """Return how many multiprocessors a CUDA device has."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def architecture(index: int) -> str:
    """Return what NVRTC calls a device: from 9.0 on with the `a` of its own instructions."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@functools.cache
def _starts_early(index: int) -> bool:
    """Tell whether a device can schedule a kernel before its predecessor ends; older ones may refuse the attribute."""
    import torch

    return torch.cuda.get_device_capability(index) >= (9, 0)


def _launch(function: Any, launch: Launch, stream: int, early: bool) -> None:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue] compiled, without stubs

    (x, y), pointers = launch.grid, _address_of(launch.pointers)
    if not early:
        _check(driver.cuLaunchKernel(function, x, y, 1, launch.threads, 1, 1, 0, stream, pointers, 0))
        return
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = x, y, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
    config.sharedMemBytes = 0
    config.hStream = stream
    config.attrs = [_programmatic()]
    config.numAttrs = 1
    _check(driver.cuLaunchKernelEx(config, function, pointers, 0))


@functools.cache
def _programmatic() -> Any:
    """The attribute of a kernel that calls wait_for_predecessor (kernels/common.cuh)."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue] compiled, without stubs

    attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value = value
    return attribute


def _address_of(pointers: Any) -> int:
    import ctypes

    return ctypes.addressof(pointers)


def _bind(index: int) -> None:
    """Make the device's primary context current where torch has not touched this thread yet."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue] compiled, without stubs

    if int(_check(driver.cuCtxGetCurrent())) == 0:
        _check(driver.cuCtxSetCurrent(_primary_context(index)))


@functools.cache
def _primary_context(index: int) -> Any:
    """Retain the context that torch uses, too; it is never released, as torch never releases it."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue] compiled, without stubs

    return _check(driver.cuDevicePrimaryCtxRetain(_check(driver.cuDeviceGet(index))))


@functools.cache
def _function(index: int, folder: Path, source: str, macros: tuple[tuple[str, str], ...], kernel: str) -> Any:
    """Return a kernel's function handle in the current context, that of device `index`."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue] compiled, without stubs

    library = _library(index, Program(source, dict(macros), folder))
    return _check(driver.cuKernelGetFunction(_check(driver.cuLibraryGetKernel(library, kernel.encode()))))


_libraries: dict[tuple[int, Program], Any] = {}


def _library(index: int, program: Program) -> Any:
    import torch
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue] compiled, without stubs

    with _loading:  # two threads would load it twice
        if (index, program) not in _libraries:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{program} is not loaded yet, and capturing a graph forbids it; run it once before")
            cubin = program.cubin(architecture(index))
            loaded = _check(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
            _libraries[index, program] = loaded
        return _libraries[index, program]


def _check(result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call, or raise with the name and the words of its error."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue] compiled, without stubs

    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(error)
        _, words = driver.cuGetErrorString(error)
        raise RuntimeError(f"the CUDA driver reports {name.decode()}: {words.decode()}")
    return values[0] if values else None
