"""Rows of long contexts are put in huge pages where the system has them, and nothing else changes."""

import mmap
import platform
import sys
from pathlib import Path

import pytest
import torch
from sparse_decode.caches import huge_pages
from sparse_decode.caches.buffer import GrowingBuffer
from sparse_decode.caches.huge_pages import in_huge_pages
from torch._subclasses.fake_tensor import FakeTensorMode

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 1 << 20


@pytest.fixture
def advised(monkeypatch):
    """Note what is asked of the system."""
    asked = []
    monkeypatch.setattr(huge_pages, "_advise", lambda: lambda *given: asked.append(given))
    return asked


@pytest.mark.parametrize("size", [2 * MIB, 3 * MIB, 9 * MIB + 123])
def test_only_whole_pages_inside_the_tensor_are_asked_for(size, advised):
    x = torch.empty(size, dtype=torch.uint8)
    assert in_huge_pages(x) is x
    ((start, length, _),) = advised
    assert start % (2 * MIB) == length % (2 * MIB) == 0
    assert x.data_ptr() <= start
    assert start + length <= x.data_ptr() + size
    assert size - length < 4 * MIB


def test_memory_that_was_written_is_moved(advised):
    in_huge_pages(torch.zeros(9 * MIB, dtype=torch.uint8), written=True)
    assert [given[2] for given in advised] == [14, 25]
    assert advised[0][:2] == advised[1][:2]


def test_small_tensors_and_those_without_memory_are_left_alone(advised):
    in_huge_pages(torch.empty(2 * MIB - 1, dtype=torch.uint8))
    in_huge_pages(torch.empty(9 * MIB, dtype=torch.uint8, device="meta"))
    with FakeTensorMode():
        in_huge_pages(torch.empty(9 * MIB, dtype=torch.uint8))
    assert not advised


def test_long_rows_ask_for_them(advised):
    buffer = GrowingBuffer()
    buffer.append(torch.zeros(1, 2, 40, 64))
    assert not advised
    buffer.append(torch.zeros(1, 2, 40_000, 64))
    assert len(advised) == 1


def test_other_systems_are_not_asked(monkeypatch):
    huge_pages._advise.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert huge_pages._advise() is None
    huge_pages._advise.cache_clear()


@pytest.mark.skipif(
    not SETTING.is_file() or "[never]" in SETTING.read_text(encoding="ascii"), reason="this system has no huge pages"
)
@pytest.mark.parametrize("written", [False, True])
def test_the_system_gives_them(written):
    if written and tuple(map(int, platform.release().split(".")[:2])) < (6, 1):
        pytest.skip("this Linux does not move what was written")

    def huge():
        return int(Path("/proc/self/smaps_rollup").read_text(encoding="ascii").split("AnonHugePages:")[1].split()[0])

    before = huge()
    fresh = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # an allocator may reuse small pages
    fresh.madvise(mmap.MADV_NOHUGEPAGE)  # some systems give huge pages unasked
    x = torch.frombuffer(fresh, dtype=torch.uint8)
    if written:
        x.fill_(1)
    x = in_huge_pages(x, written=written).fill_(1)
    assert huge() - before >= 32 * 1024  # kB: most of it
    assert x[-1] == 1
