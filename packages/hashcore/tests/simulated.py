"""Runs hashcore's CUDA kernels on the CPU, under the host simulator."""

import functools
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hashcore import reference
from hashcore.cuda.kernels import Launch
from hashcore.cuda.source import HASHCORE_KERNELS, read_source
from hashcore.validation import RowLimits
from hostsim import Simulator, check_slack, compiler, guarded
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the launches are described on torch tensors")
from hashcore.cuda import tensor_search  # noqa: E402

ORDERS = [0, 1, 7]  # ascending, descending, a seed

if compiler() is None and os.environ.get("CI") != "true":
    pytest.skip("g++ is needed to run the kernels on the CPU", allow_module_level=True)


def inside(array: np.ndarray, align: int = 16):
    """The array as a tensor between guard pages."""
    return torch.from_numpy(guarded(np.ascontiguousarray(array), align))


def empty(*shape: int, dtype=np.int32):
    """A tensor for results between guard pages, full of what no result is."""
    return torch.from_numpy(guarded(np.full(shape, -77).astype(dtype), np.dtype(dtype).itemsize))


def assert_same(tensor, expected) -> None:
    """Compare a guarded tensor with an array, or several, and check the memory around them."""
    if isinstance(expected, tuple | list):
        for one, other in zip(tensor, expected, strict=True):
            assert_same(one, other)
        return
    check_slack(tensor.numpy())
    np.testing.assert_array_equal(tensor.numpy(), expected)


def limits(width, n, k=None, lengths=None, starts=None, sink=0, recent=0) -> RowLimits:
    """What rows of n positions want and see, given as numbers of all rows, or as arrays."""
    given = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in (k, lengths, starts)]
    arrays = [x if isinstance(x, torch.Tensor) else None for x in given]
    length, start = (
        default if x is None or x is array else x
        for x, array, default in zip(given[1:], arrays[1:], (n, 0), strict=True)
    )
    return RowLimits(width, *arrays, length, start, sink, recent)


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
        for one in launches:
            self.kernels.append(one.kernel)
            how = {"order": self.order, "resident": self.resident}
            made = simulator(one.source, one.macros)
            made.launch(one.kernel, one.grid, (one.threads,), one.arguments, **how)


@contextmanager
def running(device) -> Iterator[None]:
    """Let what would be launched on a device go to this one."""
    with mock.patch("hashcore.cuda.launch.run", device):
        yield


def orders():
    """Draw devices with different thread orders."""
    return st.builds(Device, st.sampled_from(ORDERS), st.integers(1, 4))


class Scratch:
    """In place of `kept.scratch`: memory between guard pages, exactly as long as the first search needs it."""

    def __init__(self, left: int = 0):
        self.left, self.tensor = left, None

    def __call__(self, words: int, device: object):
        if self.tensor is None:
            self.tensor = inside(np.full(words, self.left, np.int32))
        assert len(self.tensor) == words
        return self.tensor


def search(device, query, keys, k, weights, blocks=None, **ranges):
    """What the kernels find for planes [..., P, W], or without weights codes [..., Q, W], among keys [..., N, W].

    With blocks [..., T], keys are in pages [..., M, S, W], which have guard pages of their own.
    """
    rows = np.broadcast_shapes(query.shape[:-2], keys.shape[: -2 if blocks is None else -3])
    rows = rows if weights else (*rows, query.shape[-2])
    width = max(1, int(np.max(k)))
    values, indices = empty(*rows, width), empty(*rows, width, dtype=np.int64)
    n = keys.shape[-2] * (1 if blocks is None else blocks.shape[-1])
    given = inside(query), inside(keys) if blocks is None else torch.from_numpy(keys), weights
    with running(device):
        tensor_search.search(*given, limits(width, n, k, **ranges), values, indices, blocks)
    return values, indices


def assert_finds(device, query, keys, k, weights, blocks=None, gathered=None, **ranges) -> None:
    """Search by the kernels, and by the reference; keys in pages are given to that gathered."""
    found = search(device, query, keys, k, weights, blocks, **ranges)
    ranges = {name: bound for name, bound in ranges.items() if bound is not None}
    expected = reference.search(query, keys if blocks is None else gathered, k, weights, order="index", **ranges)
    for ours, theirs in zip(found, expected, strict=True):
        check_slack(ours.numpy())
        slots = ours[..., : theirs.shape[-1]]  # a row of which none is wanted still has one
        np.testing.assert_array_equal(slots, theirs)
