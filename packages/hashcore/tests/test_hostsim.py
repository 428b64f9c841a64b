"""The host simulator finds errors: in modified copies of our kernels, and in small wrong kernels."""

import functools

import numpy as np
import pytest
from hashcore import reference
from hashcore.cuda import kernels
from hashcore.cuda.source import HASHCORE_KERNELS, read_source
from hashcore_samples import random_codes
from hostsim import SimulationError, Simulator, check_slack, guarded

simulated = pytest.importorskip("simulated", reason="needs torch and g++")


def mutant(name: str, original: str, changed: str, exports: list[str], macros=None) -> Simulator:
    """A kernel file with one place changed."""
    text = read_source(HASHCORE_KERNELS, name)
    assert text.count(original) == 1
    return Simulator(text.replace(original, changed), exports, macros)


def search_differs(monkeypatch, original: str, changed: str) -> bool:
    """Whether a search finds other keys, or fails, with one place of a kernel changed."""

    def read(folder, name):
        text = read_source(folder, name)
        return text.replace(original, changed) if name == "choose.cu" else text

    assert read_source(HASHCORE_KERNELS, "choose.cu").count(original) == 1
    monkeypatch.setattr(simulated, "read_source", read)
    monkeypatch.setattr(simulated, "simulator", functools.cache(simulated.simulator.__wrapped__))
    rng = np.random.default_rng(0)
    query, keys = random_codes(rng, 2, 3, 4), random_codes(rng, 2, 4800, 4) & 0x11
    for order in simulated.ORDERS:
        try:
            simulated.assert_finds(simulated.Device(order), query, keys, 333, (1, 2, 4))
        except (AssertionError, SimulationError):
            return True
    return False


CHANGES = [
    (
        "if (lane == 31) warp_sums[warp] = inclusive;\n  __syncthreads();",
        "if (lane == 31) warp_sums[warp] = inclusive;",
    ),
    ("above_before, before};\n  __syncthreads();", "above_before, before};"),
    ("equal && earlier < threshold.quota", "equal && earlier <= threshold.quota"),
]


@pytest.mark.parametrize(("original", "changed"), CHANGES)
def test_a_change_of_a_kernel_is_caught(monkeypatch, original, changed):
    assert search_differs(monkeypatch, original, changed)


def pack_with(simulator: Simulator, words: int) -> None:
    x = np.random.default_rng(0).normal(size=(words, 32)).astype(np.float32)
    inside, codes = guarded(x, 4), guarded(np.zeros(words, np.int32), 4)
    launch = kernels.pack("f32", inside.ctypes.data, codes.ctypes.data, words)
    simulator.launch(launch.kernel, launch.grid, (launch.threads,), launch.arguments)
    check_slack(codes)
    np.testing.assert_array_equal(codes[:, None], reference.pack(x))


def test_a_read_beyond_a_buffer_is_caught():
    pack_with(Simulator(read_source(HASHCORE_KERNELS, "pack.cu"), ["pack_f32"]), 5)
    broken = mutant("pack.cu", "word < words ? x[word * 32 + lane] : T()", "x[word * 32 + lane]", ["pack_f32"])
    with pytest.raises(SimulationError, match=r"access outside every buffer, at 0x\w+; block \(0, 0, 0\), thread"):
        pack_with(broken, 5)


def small(body: str, block: int = 64, order: int = 0, size: int = 64) -> np.ndarray:
    """Run one kernel with an int array `out`."""
    simulator = Simulator(
        f'extern "C" __global__ void kernel(int* out) {{ const int t = threadIdx.x; {body} }}', ["kernel"]
    )
    out = guarded(np.zeros(size, np.int32), 4)
    simulator.launch("kernel", (2,), (block,), [out], order=order)
    return out


WRONG = [
    ("if (t < 32) __syncthreads();", "__syncthreads at line 1 after 32 threads|deadlock"),
    ("if (t < 32) { __syncthreads(); } else {\n __syncthreads(); }", "threads wait at different barriers"),
    ("if (t & 1) __syncwarp();", "deadlock: lanes aaaaaaaa of mask ffffffff wait"),
    ("__ballot_sync(1u << (t + 1) % 32, 1);", "is not in its own mask"),
    ("if (t & 1) { __ballot_sync(~0u, 1); } else {\n __ballot_sync(~0u, 0); }", "different warp operations"),
    ("__shfl_sync(t % 32 < 16 ? 0xffffu : 0xffff0000u, t, 31 - t % 32);", "reads lane"),
    ("out[0] = reinterpret_cast<int4*>(out + 1)->x;", "undefined behaviour"),
    ("out[0] = 1 << (t + 32);", "undefined behaviour"),
    ("volatile char big[70000]; for (int i = 0; i < 70000; i++) big[i] = 1;", "bytes of stack|access outside"),
]


@pytest.mark.parametrize(("body", "message"), WRONG)
def test_wrong_kernels_are_reported(body, message):
    with pytest.raises(SimulationError, match=message):
        small(body)
