"""The host simulator finds errors: in modified copies of our kernels, and in small wrong kernels."""

import functools

import numpy as np
import pytest
from hashcore import reference
from hashcore.cuda import kernels
from hashcore.cuda.source import HASHCORE_KERNELS, read_source
from hostsim import SimulationError, Simulator, check_slack, guarded

simulated = pytest.importorskip("simulated", reason="needs torch and g++")


def pack_with(text: str, words: int) -> None:
    x = np.random.default_rng(0).normal(size=(words, 32)).astype(np.float32)
    inside, codes = guarded(x, 4), guarded(np.zeros(words, np.int32), 4)
    launch = kernels.pack("f32", inside.ctypes.data, codes.ctypes.data, words)
    Simulator(text, ["pack_f32"]).launch(launch.kernel, launch.grid, (launch.threads,), launch.arguments)
    check_slack(codes)
    np.testing.assert_array_equal(codes[:, None], reference.pack(x))


def test_a_read_beyond_a_buffer_is_caught():
    text, checked = read_source(HASHCORE_KERNELS, "pack.cu"), "word < words ? x[word * 32 + lane] : T()"
    pack_with(text, 5)
    assert text.count(checked) == 1
    with pytest.raises(SimulationError, match=r"access outside every buffer, at 0x\w+; block \(0, 0, 0\), thread"):
        pack_with(text.replace(checked, "x[word * 32 + lane]"), 5)


WRONG = [
    ("if (t < 32) __syncthreads();", r"__syncthreads at line \d after 32 threads|deadlock"),
    ("if (t < 32) { __syncthreads(); } else {\n __syncthreads(); }", "threads wait at different barriers"),
    ("if (t & 1) __syncwarp();", "deadlock: lanes aaaaaaaa of mask ffffffff wait"),
    ("if (t & 1) { __ballot_sync(~0u, 1); } else {\n __ballot_sync(~0u, 0); }", "different warp operations"),
    ("__shfl_sync(t % 32 < 16 ? 0xffffu : 0xffff0000u, t, 31 - t % 32);", "reads lane"),
    ("out[0] = reinterpret_cast<int4*>(out + 1)->x;", "undefined behaviour"),
]


@functools.cache
def wrong() -> Simulator:
    """All of them, compiled at once, with an int array `out`."""
    head = 'extern "C" __global__ void kernel_{}(int* out) {{ const int t = threadIdx.x; {} }}\n'
    text = "".join(head.format(number, body) for number, (body, _) in enumerate(WRONG))
    return Simulator(text, [f"kernel_{number}" for number in range(len(WRONG))])


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_kernels_are_reported(number):
    with pytest.raises(SimulationError, match=WRONG[number][1]):
        wrong().launch(f"kernel_{number}", (2,), (64,), [guarded(np.zeros(64, np.int32), 4)])
