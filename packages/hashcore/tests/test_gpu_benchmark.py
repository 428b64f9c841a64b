"""The shortlist part of benchmarks/gpu.py, run on the CPU."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the benchmark times tensors")
import hashcore  # noqa: E402
from hashcore import torch_ops  # noqa: E402

FILE = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture
def benchmark(monkeypatch):
    """The benchmark, whose every step takes a microsecond."""
    spec = importlib.util.spec_from_file_location("hashcore_gpu_benchmark", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(FILE.parent)
    spec.loader.exec_module(module)

    def run(steps, rounds=1):
        for step in steps:
            step()
        return SimpleNamespace(median=1.0)

    monkeypatch.setattr("gpu_timing.graph_time", run)
    return module


@pytest.fixture
def case(benchmark):
    draw = torch.Generator().manual_seed(0)
    heads, n, k = benchmark.HEADS, 8192, 163
    keys = [torch.randint(-(1 << 31), 1 << 31, (heads, n, 4), generator=draw).int() for _ in range(2)]
    w = torch.randn(heads, 128, generator=draw)
    out = tuple(torch.empty(heads, k, dtype=torch.int32) for _ in range(2))
    return benchmark.Case(n, k, w, keys, out)


def test_a_shortlist_is_timed_beside_what_it_finds(benchmark, case):
    found = benchmark.measure_shortlist(case, 5)
    planes, weights = hashcore.planes(case.w, benchmark.PLANES)
    options = {"weights": weights, "order": "index"}
    exact, listed = (
        hashcore.search(planes, case.keys[0], case.k, **options, shortlist=times)[1].tolist() for times in (None, 5)
    )
    shares = [len({*a} & {*b}) / case.k for a, b in zip(exact, listed, strict=True)]
    assert found == {"shortlist_5_us": 1.0, "shortlist_5_found": pytest.approx(sum(shares) / len(shares))}
    assert 0 < found["shortlist_5_found"] < 1


def test_a_shortlist_that_differs_is_not_timed(benchmark, case, monkeypatch):
    search = torch_ops.search

    def broken(*given, **how):
        found = search(*given, **how)
        if how.get("first") is not None:
            found[1][0, 0] += 1
        return found

    monkeypatch.setattr(torch_ops, "search", broken)
    with pytest.raises(SystemExit, match="the shortlist of 5 x of 8192 keys differs"):
        benchmark.measure_shortlist(case, 5)


def test_a_shortlist_is_predicted_to_cost_a_launch_and_save_bytes(benchmark, case, monkeypatch):
    monkeypatch.setattr("hashcore.cuda.launch.sm_count", lambda device: 132)
    case = case._replace(n=benchmark.SIZES[0], k=int(benchmark.FRACTION * benchmark.SIZES[0]))
    slow, fast = (benchmark.predicted_us(case, bandwidth, 5) for bandwidth in (1e6, 1e30))
    assert fast == pytest.approx(3 * benchmark.LAUNCH_US)
    assert slow - fast < 0.65 * (benchmark.predicted_us(case, 1e6) - 2 * benchmark.LAUNCH_US)
