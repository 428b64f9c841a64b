"""The kernels on the CPU: launches run by the host simulator, which is a device for hashcore.cuda.tensors."""

import functools
import os
import re
from collections.abc import Iterable

import numpy as np
import pytest
from hashcore import reference
from hashcore.cuda.kernels import Launch
from hashcore.cuda.source import HASHCORE_KERNELS, read_source
from hashcore.hostsim import Simulator, check_slack, compiler, guarded

torch = pytest.importorskip("torch", reason="the launches are described on torch tensors")

ORDERS = [0, 1, 7]  # ascending, descending, a seed

if compiler() is None and os.environ.get("CI") != "true":
    pytest.skip("g++ is needed to run the kernels on the CPU", allow_module_level=True)


def inside(array: np.ndarray, align: int = 16):
    """The array as a tensor between guard pages."""
    return torch.from_numpy(guarded(np.ascontiguousarray(array), align))


def empty(*shape: int, dtype=np.int32):
    """A tensor for results between guard pages, full of what no result is."""
    return torch.from_numpy(guarded(np.full(shape, -77, dtype), np.dtype(dtype).itemsize))


def assert_same(tensor, expected) -> None:
    check_slack(tensor.numpy())
    np.testing.assert_array_equal(tensor.numpy(), expected)


def tensor_or(value):
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


@functools.cache
def simulator(source: str, macros: tuple[tuple[str, str], ...]) -> Simulator:
    text = read_source(HASHCORE_KERNELS, source)
    kernels = re.findall(r"^\w*_KERNEL\((\w+), ", text, re.M) + re.findall(
        r"__launch_bounds__\([^)]*\)\s+(\w+)\(const", text
    )
    missing = {"name", "score_all"} if "HASHCORE_PAGES" in dict(macros) else {"name"}
    return Simulator(text, [name for name in kernels if name not in missing], dict(macros))


class Device:
    """Runs launches in one thread order and counts them."""

    def __init__(self, order: int = 0, resident: int = 3):
        self.order, self.resident, self.kernels = order, resident, []

    def __call__(self, launches: Iterable[Launch], device: object = None) -> None:
        for launch in launches:
            self.kernels.append(launch.kernel)
            simulator(launch.source, launch.macros).launch(
                launch.kernel,
                launch.grid,
                (launch.threads,),
                launch.arguments,
                order=self.order,
                resident=self.resident,
            )


def window_topk(scores: np.ndarray, k, lengths=None, starts=None, sink=0, recent=0, width=None):
    """The best k of [start + sink, length - recent) of each row of [rows, N], by the reference."""
    rows, n = scores.shape
    sizes = np.broadcast_to(k, rows)
    lengths = np.broadcast_to(n if lengths is None else lengths, rows)
    starts = np.broadcast_to(0 if starts is None else starts, rows)
    width = int(sizes.max(initial=0)) if width is None else width
    values, indices = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int64)
    for row in range(rows):
        low, high = starts[row] + sink, lengths[row] - recent
        count = min(int(sizes[row]), max(high - low, 0))
        if count:
            best, at = reference.topk(scores[row, low:high], count)
            values[row, :count], indices[row, :count] = best, at + low
    return values, indices
