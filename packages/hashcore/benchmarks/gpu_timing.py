"""Times device work for benchmarks: with CUDA graphs, which exclude the host's time, and CUDA events."""

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

REPLAYS = 40  # maximal number of replays of a graph
CLOCKS = ["driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw"]


class Times(NamedTuple):
    """Microseconds per step: the median and the quartiles of the replays."""

    median: float
    low: float
    high: float


def graph_of(steps: Sequence[Callable[[], Any]]) -> "torch.cuda.CUDAGraph":
    """Capture the steps in order, after running each once outside of the capture."""
    import torch

    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return graph


def graph_time(steps: Sequence[Callable[[], Any]], rounds: int = 1, seconds: float = 2.0) -> Times:
    """Return the time of one step in a graph that runs all steps `rounds` times.

    Args:
        steps: the same work on different data; together they should read more than the L2 cache.
        seconds: no replay starts after this time; at least five are timed.
    """
    import torch

    graph = graph_of([step for _ in range(rounds) for step in steps])
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    begun, taken = time.perf_counter(), []
    while len(taken) < 5 or (len(taken) < REPLAYS and time.perf_counter() - begun < seconds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        taken.append(1000 * first.elapsed_time(last) / (rounds * len(steps)))
    low, median, high = statistics.quantiles(taken, n=4)
    return Times(median, low, high)


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Return the bandwidth of copying `size` bytes on the device: bytes read and written per microsecond."""
    import torch

    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / graph_time([lambda: target.copy_(source)], rounds=4).median


def environment() -> dict[str, Any]:
    """Return device, driver, versions and date; clocks are those of the idle device."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__,
        "idle": state(),
    }


def state() -> dict[str, str] | None:
    """Return driver, clocks and power of the current device now, from nvidia-smi; None without it."""
    import torch

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    query = [tool, "-i", f"GPU-{uuid}", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(CLOCKS, values, strict=True)) if len(values) == len(CLOCKS) else None


def state_under(graph: "torch.cuda.CUDAGraph", step_us: float, seconds: float = 1.5) -> dict[str, str] | None:
    """Return `state` while the device replays a graph of `step_us` microseconds."""
    import torch

    for _ in range(max(1, int(seconds * 1e6 / step_us))):
        graph.replay()
    seen = state()
    torch.cuda.synchronize()
    return seen
