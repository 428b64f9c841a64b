"""The host simulator finds errors: in modified copies of our kernels, and in small wrong kernels."""

import os

import numpy as np
import pytest
from hashcore import reference
from hashcore.cuda import kernels, layout
from hashcore.cuda.layout import RowMap, Selection, Window, Workspace
from hashcore.cuda.source import HASHCORE_KERNELS, read_source
from hostsim import SimulationError, Simulator, check_slack, compiler, guarded

if compiler() is None and os.environ.get("CI") != "true":
    pytest.skip("g++ is needed to run kernels on the CPU", allow_module_level=True)

SELECT = ["count_32", "select_32_32"]


def mutant(name: str, original: str, changed: str, exports: list[str], macros=None) -> Simulator:
    """A kernel file with one place changed."""
    text = read_source(HASHCORE_KERNELS, name)
    assert text.count(original) == 1
    return Simulator(text.replace(original, changed), exports, macros)


def topk_with(simulator: Simulator, scores: np.ndarray, k: int, order: int) -> np.ndarray:
    rows, n = scores.shape
    plan = Workspace.plan(rows, n, layout.INT32_LEVELS, 3)
    inside, scratch = guarded(scores), guarded(np.zeros(plan.words, np.int32))
    values, indices = guarded(np.zeros((rows, k), np.int32), 4), guarded(np.zeros((rows, k), np.int32), 4)
    output = kernels.Output(values.ctypes.data, indices.ctypes.data, 32)
    window, selection = Window(None, None, 1, 1, n, 0, 0, 0, n), Selection(None, 1, k, k)
    for launch in kernels.topk(inside.ctypes.data, n, rows, window, selection, output, scratch.ctypes.data, plan):
        simulator.launch(launch.kernel, launch.grid, (launch.threads,), launch.arguments, order=order)
    return indices


def topk_differs(simulator: Simulator, orders=(0, 1, 7)) -> bool:
    scores = np.random.default_rng(0).integers(0, 40, (3, 4800)).astype(np.int32)
    expected = reference.topk(scores, 333)[1]
    for order in orders:
        try:
            if not np.array_equal(topk_with(simulator, scores, 333, order), expected):
                return True
        except SimulationError:
            return True
    return False


def test_the_kernels_as_they_are_select_right():
    assert not topk_differs(Simulator(read_source(HASHCORE_KERNELS, "select.cu"), SELECT))


# A barrier each: before the sums of the warps are read, after the counts were cleared, after they were counted.
BARRIERS = [
    (
        "if (lane == 31) warp_sums[warp] = inclusive;\n  __syncthreads();",
        "if (lane == 31) warp_sums[warp] = inclusive;",
    ),
    ("counts[bin] = 0;\n  __syncthreads();", "counts[bin] = 0;"),
    ("u32* totals, u32* table) {\n  __syncthreads();", "u32* totals, u32* table) {"),
]


@pytest.mark.parametrize(("original", "changed"), BARRIERS)
def test_a_missing_barrier_is_caught(original, changed):
    assert topk_differs(mutant("select.cu", original, changed, SELECT))


def test_a_wrong_tie_rule_is_caught():
    assert topk_differs(mutant("select.cu", "same && equal < quota", "same && equal <= quota", SELECT))


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


def test_a_write_beyond_a_buffer_is_caught():
    broken = mutant("pack.cu", "if (first + lane < words) codes", "codes", ["pack_f32"])
    with pytest.raises(SimulationError, match="access outside every buffer"):
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


def test_shared_memory_is_a_blocks_own_and_starts_poisoned():
    body = "__shared__ int x[64]; out[t] |= x[t] != int(0xA5A5A5A5); x[t] = 1;"
    assert not small(body).any()


def test_blocks_in_flight_keep_their_shared_memory():
    body = "__shared__ int x; if (t == 0) x = blockIdx.x; __syncthreads(); out[t] += x == int(blockIdx.x);"
    for order in (0, 1, 5):
        assert (small(body, order=order) == 2).all()


def test_thread_orders_are_what_they_are_called():
    turns = [tuple(small("out[t] = atomicAdd(out + 64, 1);", order=order, size=65)[:64]) for order in (0, 1, 5)]
    assert turns[0] == tuple(range(64, 128))  # of the second block
    assert turns[1] == tuple(range(64, 128))[::-1]
    assert turns[2] not in turns[:2]


def test_after_a_failure_the_simulator_works_again():
    simulator = Simulator(
        'extern "C" __global__ void kernel(int* out, int bad) { if (bad) *(int*)0 = 1; out[threadIdx.x] = 3; }',
        ["kernel"],
    )
    out = guarded(np.zeros(32, np.int32), 4)
    with pytest.raises(SimulationError):
        simulator.launch("kernel", (1,), (32,), [out, np.int32(1)])
    simulator.launch("kernel", (1,), (32,), [out, np.int32(0)])
    assert (out == 3).all()


def test_a_source_that_does_not_compile_shows_the_compilers_words():
    with pytest.raises(RuntimeError, match=r"g\+\+ refused the kernels kernel:[\s\S]*nonsense"):
        Simulator("nonsense", ["kernel"])


def test_an_unknown_kernel_is_refused():
    simulator = Simulator('extern "C" __global__ void kernel() {}', ["kernel"])
    with pytest.raises(SimulationError, match="other: no kernel of that name"):
        simulator.launch("other", (1,), (32,), [])


def test_rows_of_a_map_merge():
    merged = layout.collapse((2, 3, 4), (48, 16, 4), (0, 0, 0), 4)
    assert isinstance(merged, RowMap)
    assert (list(merged.size), list(merged.query), list(merged.keys)) == ([1, 1, 1, 24], [0, 0, 0, 4], [0, 0, 0, 0])
