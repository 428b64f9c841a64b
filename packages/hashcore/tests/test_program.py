"""Kernel sources, macros and cubins, what is kept of launches, and their order; no GPU is needed."""

import ctypes
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hashcore.cuda.source import HASHCORE_KERNELS, read_source
from hashcore.validation import RowLimits

torch = pytest.importorskip("torch", reason="launches go to torch's stream")
pytest.importorskip("cuda.core", reason="cuda-core comes with the extra hashcore[cuda]")
program = pytest.importorskip("hashcore.cuda.program")
from hashcore.cuda import kept, kernels, launch, tensor_search  # noqa: E402

Program, CompileError = program.Program, program.CompileError

KERNEL = '#include "own.cuh"\nextern "C" __global__ void kernel(int* out) { *out = VALUE + OWN; }\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of kernels of another package, and a cache of its own."""
    monkeypatch.setenv("HASHCORE_CACHE", str(tmp_path / "cache"))
    read_source.cache_clear()
    path = tmp_path / "kernels"
    path.mkdir()
    (path / "kernel.cu").write_text(KERNEL)
    (path / "own.cuh").write_text("#pragma once\nconstexpr int OWN = 1;\n")
    return path


def test_a_second_program_reads_the_cubin_from_disk(folder, monkeypatch):
    first = Program("kernel.cu", {"VALUE": 3}, folder).cubin("sm_90a")
    assert first.startswith(b"\x7fELF")
    monkeypatch.setattr(Program, "compile", lambda *_: pytest.fail("compiled again"))
    assert Program("kernel.cu", {"VALUE": "3"}, folder).cubin("sm_90a") == first


def test_the_key_covers_all_that_makes_the_cubin(folder):
    keys = [Program("kernel.cu", {"VALUE": 3}, folder).cache_key("sm_90a")]
    keys.append(Program("kernel.cu", {"VALUE": 4}, folder).cache_key("sm_90a"))
    keys.append(Program("kernel.cu", {"VALUE": 3}, folder).cache_key("sm_80"))
    for name in ("own.cuh", "kernel.cu"):
        path = folder / name
        path.write_text(path.read_text() + "// changed\n")
        read_source.cache_clear()
        keys.append(Program("kernel.cu", {"VALUE": 3}, folder).cache_key("sm_90a"))
    assert len(set(keys)) == 5


def test_errors_name_the_kernel_the_line_and_what_is_missing(folder):
    (folder / "own.cuh").write_text("\nconstexpr int OWN = undefined_name;\n")
    with pytest.raises(CompileError) as refused:
        Program("kernel.cu", {"VALUE": 3}, folder).cubin("sm_86")
    for part in ("kernel.cu -DVALUE=3", "sm_86", "own.cuh(2): error", "undefined_name"):
        assert part in str(refused.value)
    (folder / "own.cuh").write_text("#pragma once\n")
    (folder / "kernel.cu").write_text('\n#include "own.cuh"\n#include "own.cuh"\nundefined_name;\n')
    read_source.cache_clear()
    with pytest.raises(CompileError, match=r"kernel\.cu\(4\): error"):  # lines keep their numbers after a header
        Program("kernel.cu", folder=folder).cubin("sm_80")
    (folder / "own.cuh").unlink()
    read_source.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"expected own\.cuh in .*found none"):
        Program("kernel.cu", folder=folder).source()


def test_a_cache_that_cannot_be_written_is_reported_and_done_without(folder, monkeypatch, caplog):
    (folder / "file").write_text("")
    monkeypatch.setenv("HASHCORE_CACHE", str(folder / "file"))
    program._report_cache.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert Program("kernel.cu", {"VALUE": 3}, folder).cubin("sm_80")
    assert "set HASHCORE_CACHE to a writeable folder" in caplog.text


def test_a_kernel_that_starts_early_waits_before_it_reads():
    """In a search of 8 rows of 9,000 keys; else it would read what is not there yet, which a simulator cannot see."""
    launched, query, keys = [], torch.zeros(8, 3, 4, dtype=torch.int32), torch.zeros(8, 9000, 4, dtype=torch.int32)
    out = torch.zeros(8, 5, dtype=torch.int32), torch.zeros(8, 5, dtype=torch.int64)
    with mock.patch("hashcore.cuda.launch.run", lambda one, _: launched.extend(one)):
        tensor_search.search(query, keys, (1, 2, 4), RowLimits(5, None, None, None, 9000, 0, 0, 0), *out)
    for one in launched:
        assert one.programmatic
        text, name = read_source(HASHCORE_KERNELS, one.source), one.kernel
        found = re.search(rf"^[^\n;]*\b{name}\([^;{{]*\) \{{\n(.*?)\n  wait_for_predecessor\(\);\n", text, re.M | re.S)
        bounds, rest = found[1].split("wait_for_bounds(window, selection);")
        assert not re.search(r"\w\(", bounds)
        assert not re.search(r"__ld|load_|\bHeld|\bQuery\b|\.read\(|atomic|(values|indices|lists|counts)\[", rest)


def test_a_missing_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(ValueError, match=r"it is not installed.*pip install"):
        program.require_compiler()


# ---- What is kept of launches: bounded, and separate for each device, stream and folder of kernels ------------------


def test_words_of_zeros_are_kept_for_what_runs_in_order(monkeypatch):
    monkeypatch.setattr(kept, "_zeroed", kept.Table(2))
    lanes = iter([(0, 7), (0, 7), (0, 8), (0, 7), (1, 7, 33), (0, 7)])
    monkeypatch.setattr(launch, "lane", lambda device: next(lanes))
    here = torch.device("cpu")
    first, again, stream, more, capture, evicted = (kept.zeroed(words, here) for words in (90, 40, 90, 91, 9, 9))
    assert (again is first, stream is first, evicted is more) == (True, False, True)
    assert (len(more), len(capture)) == (91, 9)


@pytest.fixture
def driver(monkeypatch):
    """What a stand-in for the driver is told, in order: it takes the structures of the real bindings."""
    from cuda.bindings import driver as real

    fine, broken, said = real.CUresult.CUDA_SUCCESS, real.CUresult.CUDA_ERROR_LAUNCH_TIMEOUT, []

    def note(*what, found=()):
        said.append(what)
        return fine, *found

    def arguments(pointers):
        return [ctypes.c_int64.from_address(at).value for at in (ctypes.c_void_p * 3).from_address(pointers)]

    def start(function, x, y, z, bx, by, bz, shared, stream, pointers, extra):
        note(function, (x, y, z), (bx, by, bz), shared, stream, *arguments(pointers))
        return (broken if y == 99 else fine,)

    def start_early(config, function, pointers, extra):
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        (early,) = config.attrs
        flags = int(early.id), early.value.programmaticStreamSerializationAllowed
        return note(function, grid, block, config.sharedMemBytes, int(config.hStream), *arguments(pointers), flags)

    names = "CUresult", "CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeValue", "CUlaunchAttributeID"
    stand_in = SimpleNamespace(
        **{name: getattr(real, name) for name in names},
        cuCtxGetCurrent=lambda: (fine, 0),
        cuCtxSetCurrent=lambda context: note("context", context),
        cuDeviceGet=lambda index: (fine, index),
        cuDevicePrimaryCtxRetain=lambda device: (fine, 0x77),
        cuLibraryLoadData=lambda code, *_: note("load", code, found=[0x11]),
        cuLibraryGetKernel=lambda library, name: note("kernel", name, found=[0x22]),
        cuKernelGetFunction=lambda kernel: (fine, 0x33),
        cuLaunchKernel=start,
        cuLaunchKernelEx=start_early,
        cuGetErrorName=lambda error: (fine, b"CUDA_ERROR_NAME"),
        cuGetErrorString=lambda error: (fine, b"its words"),
    )
    cached = launch._starts_early, launch._programmatic, launch._function, launch._primary_context
    monkeypatch.setattr(launch, "_driver", lambda: stand_in)
    monkeypatch.setattr(launch, "_libraries", {})
    monkeypatch.setattr(launch, "_threads", launch._Threads())
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    monkeypatch.setattr(launch, "_current_stream", lambda index: 0x5555)
    monkeypatch.setattr(Program, "cubin", lambda self, architecture: architecture.encode())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    for function in cached:
        function.cache_clear()
    yield said
    for function in cached:
        function.cache_clear()


def test_launches_reach_the_driver_as_they_are_described(driver, monkeypatch):
    device = torch.device("cuda:0")

    def pack(**how):
        return kernels.pack("f32", 0x1000, 0x2000, 12345)._replace(**how)

    launch.run([pack(), pack(programmatic=True)], device)
    whole = 0x33, (49, 1, 1), (256, 1, 1), 0, 0x5555, 0x1000, 0x2000, 12345
    assert driver[:3] == [("context", 0x77), ("load", b"sm_90a"), ("kernel", b"pack_f32")]
    assert driver[3:] == [whole, (*whole, (6, 1))]
    del driver[:]
    launch._starts_early.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    launch.run([pack(programmatic=True)], device)
    launch.run((kernels.pack("f32", 0x3000 + i, 0x4000 + i, i) for i in range(3)), device)  # the caller keeps none
    assert driver[0] == whole
    assert [told[-3:] for told in driver[1:]] == [(0x3000 + i, 0x4000 + i, i) for i in range(3)]
    with pytest.raises(RuntimeError, match="the CUDA driver reports CUDA_ERROR_NAME: its words"):
        launch.run([pack(grid=(1, 99))], device)
    del driver[:]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    words = "planes.cu cannot be loaded while a CUDA graph is captured; run it once before"
    with pytest.raises(RuntimeError, match=words):
        launch.run([pack(), pack(source="planes.cu")], device)  # the first could go, the second cannot
    assert driver == []


def test_launches_are_prepared_once_a_device_and_folder(driver, monkeypatch):
    found, device = [], SimpleNamespace(here=0)
    monkeypatch.setattr(launch, "_function", lambda index, folder, *_: found.append((index, folder.name)))
    monkeypatch.setattr(launch, "_current_device", lambda: device.here)
    launches = [kernels.pack("f32", 1, 2, 3)]
    ours, others = Path("ours"), Path("others")
    for device.here, folder in ((0, ours), (0, ours), (1, ours), (0, ours), (0, others), (0, ours), (1, others)):
        launch.run(launches, torch.device("cuda"), folder)
    assert found == [(0, "ours"), (1, "ours"), (0, "others"), (1, "others")]
