"""Launches on a device: cubins loaded once per device, arguments packed once, torch's current stream, no host sync."""

import ctypes
import functools
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from hashcore.cuda.kernels import Launch
from hashcore.cuda.program import Program
from hashcore.cuda.source import HASHCORE_KERNELS

_loading = threading.Lock()


def run(launches: Iterable[Launch], device: torch.device, folder: Path = HASHCORE_KERNELS) -> None:
    """Launch kernels one after the other on torch's current stream of a CUDA device.

    The first launch of a kernel compiles it, or reads it from the disk cache, and loads it. This takes 1 to 300 ms and
    is not allowed during a CUDA graph capture. Later launches use neither disk nor lock, and may be captured. If one of
    the kernels cannot be loaded, none is launched.

    Args: folder: the folder of the sources.
    Raises: CompileError; RuntimeError with the driver's message, or if a kernel would have to be loaded during a
        capture.
    """
    here, index = _current_device(), device.index
    if index is None:
        index = here
    elif index != here:  # cuLaunchKernel goes to the calling thread's current context
        with torch.cuda.device(index):
            return run(launches, device, folder)
    kept = [*launches]  # the driver reads their arguments
    where = index, folder
    stream = _current_stream(index)
    for call in [one.calls.get(where) or _prepare(one, *where) for one in kept]:
        call(stream)
    return None


def _current_device() -> int:
    return torch._C._cuda_getDevice()  # takes a third of the time of torch.cuda.current_device


def _current_stream(index: int) -> int:
    return torch._C._cuda_getCurrentRawStream(index)  # a tenth of what making a Stream costs


def lane(device: torch.device) -> tuple[Any, ...]:
    """Return a key for work that a device does in order: device, stream and, in a capture, its number.

    Later work in the same lane may reuse its memory. Without a device (host simulator) the key is ().
    """
    if device.type != "cuda":
        return ()
    index = _current_device() if device.index is None else device.index
    stream = _current_stream(index)
    if not torch._C._cuda_isCurrentStreamCapturing():
        return index, stream
    return index, stream, int(_check(_driver().cuStreamGetCaptureInfo(stream))[1])


class _Threads(threading.local):
    """The devices whose context a thread has made current."""

    def __init__(self) -> None:
        self.bound: set[int] = set()


_threads = _Threads()


@functools.cache
def sm_count(device: torch.device) -> int:
    """Return the number of SMs of a device; of the simulated one 3, so that tests cover several chunks and turns."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@functools.cache
def counts_bits(device: torch.device) -> bool:
    """Whether tensor cores multiply bits (tensor.cuh), as the simulated device's; from 10.0 on that is emulated."""
    return device.type != "cuda" or (8, 0) <= torch.cuda.get_device_capability(device) < (10, 0)


def architecture(index: int) -> str:
    """Return NVRTC's name of a device's architecture; from 9.0 on with `a`, for architecture-specific instructions."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@functools.cache
def _starts_early(index: int) -> bool:
    """Whether a device supports programmatic launches: a kernel may be scheduled before its predecessor ends."""
    return torch.cuda.get_device_capability(index) >= (9, 0)


def _prepare(launch: Launch, index: int, folder: Path) -> Callable[[int], None]:
    """Load a launch's kernel, and return a function that launches it on a stream; the launch keeps it."""
    if index not in _threads.bound:
        _bind(index)
        _threads.bound.add(index)
    function = _function(index, folder, launch.source, launch.macros, launch.kernel)
    early = launch.programmatic and _starts_early(index)
    call = launch.calls[index, folder] = _early_call(function, launch) if early else _plain_call(function, launch)
    return call


def _plain_call(function: Any, launch: Launch) -> Callable[[int], None]:
    start, success = _driver().cuLaunchKernel, _driver().CUresult.CUDA_SUCCESS
    (x, y), threads, pointers = launch.grid, launch.threads, ctypes.addressof(launch.pointers)

    def call(stream: int) -> None:
        result = start(function, x, y, 1, threads, 1, 1, 0, stream, pointers, 0)
        if result[0] != success:
            _check(result)

    return call


def _early_call(function: Any, launch: Launch) -> Callable[[int], None]:
    driver = _driver()
    start, success = driver.cuLaunchKernelEx, driver.CUresult.CUDA_SUCCESS
    config, pointers = driver.CUlaunchConfig(), ctypes.addressof(launch.pointers)
    config.gridDimX, config.gridDimY, config.gridDimZ = *launch.grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
    config.sharedMemBytes = 0
    config.attrs = [_programmatic()]
    config.numAttrs = 1

    last = -1

    def call(stream: int) -> None:
        nonlocal last
        if stream != last:
            config.hStream = last = stream
        result = start(config, function, pointers, 0)
        if result[0] != success:
            _check(result)

    return call


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue] compiled, without stubs

    return driver


@functools.cache
def _programmatic() -> Any:
    """Return the launch attribute for kernels that call wait_for_predecessor (kernels/common.cuh)."""
    driver = _driver()
    attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value = value
    return attribute


def _bind(index: int) -> None:
    """Make the device's primary context current, if torch has not done so in this thread yet."""
    driver = _driver()
    if int(_check(driver.cuCtxGetCurrent())) == 0:
        _check(driver.cuCtxSetCurrent(_primary_context(index)))


@functools.cache
def _primary_context(index: int) -> Any:
    """Retain the primary context, which torch also uses; it is never released, as in torch."""
    driver = _driver()
    return _check(driver.cuDevicePrimaryCtxRetain(_check(driver.cuDeviceGet(index))))


@functools.cache
def _function(index: int, folder: Path, source: str, macros: tuple[tuple[str, str], ...], kernel: str) -> Any:
    """Return a kernel's function handle in the current context, that of device `index`."""
    driver = _driver()
    library = _library(index, Program(source, dict(macros), folder))
    return _check(driver.cuKernelGetFunction(_check(driver.cuLibraryGetKernel(library, kernel.encode()))))


_libraries: dict[tuple[int, Program], Any] = {}


def _library(index: int, program: Program) -> Any:
    driver = _driver()
    with _loading:  # two threads would load it twice
        if (index, program) not in _libraries:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{program} cannot be loaded while a CUDA graph is captured; run it once before")
            cubin = program.cubin(architecture(index))
            loaded = _check(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
            _libraries[index, program] = loaded
        return _libraries[index, program]


def _check(result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call; raise RuntimeError with the name and description of an error."""
    driver = _driver()
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(error)
        _, words = driver.cuGetErrorString(error)
        raise RuntimeError(f"the CUDA driver reports {name.decode()}: {words.decode()}")
    return values[0] if len(values) == 1 else values or None
