"""Shared helpers: random codes, exact comparisons, a fixed number of threads, calls of every operator."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import pytest


def random_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def codes_of(seed: int, n: int, words: int, alphabet: int = 2**32) -> np.ndarray:
    """Return random codes; a small alphabet makes ties."""
    drawn = np.random.default_rng(seed).integers(0, alphabet, (n, words), dtype=np.uint64)
    return drawn.astype(np.uint32).view(np.int32)


def vectors_of(seed: int, n: int, dim: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


def same_state(a, b) -> None:
    """Compare two of BitIndex."""
    assert list(a) == list(b)
    np.testing.assert_array_equal(a.codes, b.codes)


def assert_same(actual, expected) -> None:
    """Compare arrays, or CPU tensors with arrays, or tuples of them: dtype, shape and every element."""
    if isinstance(expected, tuple | list):
        for a, b in zip(actual, expected, strict=True):
            assert_same(a, b)
        return
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected, strict=True)


@contextmanager
def on_threads(workers: int) -> Iterator[None]:
    """Let calls use this many threads, whatever their work; no plan is kept."""
    from hashcore import cpu

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(cpu.threads, "count", return_value=workers))
        stack.enter_context(mock.patch.object(cpu, "MOST_ROWS", -1))
        yield


def unaligned(x: np.ndarray) -> np.ndarray:
    """Return a copy that begins one byte after where its elements should."""
    memory = np.empty(x.nbytes + 1, np.uint8)
    moved = memory[1:].view(x.dtype).reshape(x.shape)
    moved[...] = x
    assert not moved.flags.aligned
    return moved


def pool_of(rng, pages: int, size: int, heads: int, words: int, *, heads_outside: bool, tail: int = 4, hold=np.copy):
    """Codes [heads, pages, size, words] inside pages that have other words before and after them; `hold` moves ."""
    memory = hold(random_codes(rng, pages, 4 * words + size * heads * words + tail * words))
    codes = memory[:, 4 * words : 4 * words + size * heads * words]
    if heads_outside:  # a head's keys of a page side by side
        return codes.reshape(pages, heads, size, words).transpose(1, 0, 2, 3)
    return codes.reshape(pages, size, heads, words).transpose(2, 0, 1, 3)


def shuffled_tables(rng, lengths: np.ndarray, size: int, spare: int, shared: int) -> tuple[np.ndarray, int]:
    """Tables [B, T] of pages in no order, the first `shared` the same in all rows; what is behind the last is wrong."""
    needed = -(-lengths // size)
    width, pages = int(needed.max(initial=0)) + spare, int(needed.sum()) + 3
    free = rng.permutation(pages)
    tables = rng.choice([-1, pages, 2**30, -(2**31)], (len(lengths), width))
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
    common = min(shared, int(needed.min(initial=0)))
    tables[:, :common] = tables[:1, :common]
    return tables, pages


def tensor(x):
    """The tensor over an array's memory, or of a copy where torch has no such tensors; others as they are."""
    if not isinstance(x, np.ndarray):
        return x
    torch = pytest.importorskip("torch", reason="torch is an optional extra of hashcore")
    if any(stride < 0 for stride in x.strides) or not x.flags.aligned or not x.dtype.isnative:
        x = np.array(x, x.dtype.newbyteorder("="))
    return torch.from_numpy(x if x.flags.writeable else x.copy())


LAYOUTS = {
    "side by side": np.copy,
    "every second": lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
    "words apart": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "columns first": np.asfortranarray,
    "backwards": lambda x: np.copy(x[::-1, ..., ::-1])[::-1, ..., ::-1],
    "unaligned": unaligned,
    "repeated": lambda x: np.broadcast_to(x[:1], x.shape),
}
"""The same numbers, or the first of them repeated, elsewhere in memory."""


def operator_samples(device: str):
    """One call of every torch operator on a device."""
    import torch

    def codes(*shape: int):
        return torch.from_numpy(random_codes(np.random.default_rng(len(shape)), *shape)).to(device)

    query, keys, weights, x = codes(2, 1, 3, 4), codes(1, 3, 33, 4), [1, 2, 4], torch.randn(3, 64, device=device)
    k, bound = torch.tensor([[3, 0, 9], [1, 1, 1]], device=device), torch.tensor([[33], [20]], device=device)
    scores, ranges = codes(2, 33) % 99, (None, None, 33, 0, 1, 2)  # lengths, starts, length, start, sink, recent
    return {
        "pack": (x,),
        "quantise": (x[:, :40], 3, True),
        "planes": (x, 3, False),
        "group_planes": (codes(2, 7, 4),),
        "score": (query, keys, weights),
        "topk": (scores, 5, None, *ranges),
        "search": (query, keys, weights, True, None, 9, k, bound, *ranges[1:]),
    }
