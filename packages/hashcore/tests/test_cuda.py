"""The public functions on a GPU against the same functions of numpy arrays: tolerance 0. Skipped without one."""

import hashcore
import numpy as np
import pytest
from hashcore_samples import operator_samples, random_codes, tensor
from test_ops import (  # noqa: F401  they run here with the fixture `backend` of this file
    CODES,
    ORDERS,
    check,
    ranges,
    test_group_planes,
    test_layouts_do_not_change_the_result,
    test_leading_dimensions_broadcast,
    test_pack_and_unpack,
    test_quantise_and_planes,
    test_score,
    test_search,
    test_search_in_pages,
    test_topk,
)

torch = pytest.importorskip("torch", reason="torch is an optional extra of hashcore")
pytest.importorskip("cuda.core", reason="cuda-core comes with the extra hashcore[cuda]")
torch_ops = pytest.importorskip("hashcore.torch_ops", reason="torch is an optional extra of hashcore")

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; test_kernels.py runs on the CPU"),
]
LENGTHS = [1, 9, 33, 129, 2049, 9001, 70_001, 300_000]


def repeating(rng: np.random.Generator, rows: int, n: int, words: int) -> np.ndarray:
    """Codes of which many are alike, so that scores tie."""
    return np.take_along_axis(random_codes(rng, rows, 50, words), rng.integers(0, 50, (rows, n))[..., None], 1)


def assert_equal(ours, expected) -> None:
    if isinstance(expected, tuple):
        assert len(ours) == len(expected)
        for one, other in zip(ours, expected, strict=True):
            assert_equal(one, other)
    else:
        assert ours.device.type == DEVICE.type
        np.testing.assert_array_equal(ours.cpu().numpy(), expected, strict=True)


@pytest.fixture
def backend():
    """The tests of every function that are imported above, on a GPU."""

    def call(function, *given, **options):
        found = getattr(hashcore, function)(*map(moved, given), **{name: moved(x) for name, x in options.items()})
        return tuple(map(back, found)) if isinstance(found, tuple) else back(found)

    return call


def back(x):
    return x.cpu() if isinstance(x, torch.Tensor) else x


def moved(x):
    return x.to(DEVICE) if isinstance(x := tensor(x), torch.Tensor) else x


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize(("words", "weights"), CODES[2:6])
def test_searches_of_any_length(rng, backend, words, weights, n):
    planes, keys = random_codes(rng, 3, len(weights), words), repeating(rng, 3, n, words)
    for how in ranges(rng, 3, n):
        for k in (min(n, 1 + n // 50), rng.integers(0, n + 1, 3)):
            for order in ORDERS:
                check(backend, "search", planes, keys, k, weights, order=order, **how)


def test_work_waits_for_the_current_stream(rng):
    """On a stream of its own that first sleeps and then brings the inputs."""
    planes, keys = random_codes(rng, 4, 3, 4), random_codes(rng, 4, 50_000, 4)
    inputs = [torch.zeros(x.shape, dtype=torch.int32, device=DEVICE) for x in (planes, keys)]
    sources = [torch.from_numpy(x).pin_memory() for x in (planes, keys)]
    hashcore.search(*inputs, 99, (1, 2, 4))  # loads the kernels
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        for x, source in zip(inputs, sources, strict=True):
            x.copy_(source, non_blocking=True)
        found = hashcore.search(*inputs, 99, (1, 2, 4))
        torch.cuda.current_stream().synchronize()
    assert_equal(found, hashcore.search(planes, keys, 99, (1, 2, 4)))


@pytest.mark.parametrize("n", [3000, 200_000])
def test_a_graph_replays_on_new_values(rng, n):
    """Planes, lengths and keys change between replays; the memory is ready for each."""
    w, keys = rng.normal(size=(4, 128)).astype(np.float32), random_codes(rng, 4, n, 4)
    inputs, lengths = [moved(w), moved(keys)], moved(np.full(4, n))

    def step():
        planes, weights = hashcore.planes(inputs[0], 3, check=False)
        ranged = hashcore.search(planes, inputs[1], 50, weights, lengths=lengths, sink=2, order="index")
        return ranged, hashcore.search(planes, inputs[1], 50, weights, lengths=lengths)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ranged, best = step()
    for _ in range(4):
        w, keys = rng.normal(size=(4, 128)).astype(np.float32), repeating(rng, 4, n, 4)
        length = rng.integers(0, n + 1, 4)
        for x, value in zip([*inputs, lengths], (w, keys, length), strict=True):
            x.copy_(torch.from_numpy(value))
        graph.replay()
        planes, weights = hashcore.planes(w, 3)
        assert_equal(ranged, hashcore.search(planes, keys, 50, weights, lengths=length, sink=2, order="index"))
        assert_equal(best, hashcore.search(planes, keys, 50, weights, lengths=length))


def test_a_kernel_is_not_loaded_during_a_capture(rng):
    codes = moved(random_codes(rng, 3, 17))  # no other test has codes of this length
    graph = torch.cuda.CUDAGraph()
    forbidden = pytest.raises(RuntimeError, match="cannot be loaded while a CUDA graph is captured; run it once before")
    with forbidden, torch.cuda.graph(graph):
        hashcore.score(codes, codes)
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", operator_samples("meta"))
def test_operators_keep_their_schema_and_their_shapes(name):
    torch.library.opcheck(getattr(torch.ops.hashcore, name).default, operator_samples("cuda")[name])
