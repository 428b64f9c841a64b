"""Tests run two at a time (pyproject.toml), so each gets one thread: two that share a core wait for each other."""

import collections
import gc
import os
import sys

import pytest

GOLDEN = (5**0.5 - 1) / 2
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark cases of a test slow, all but as many as its marker `sample` says: the first, and others spread over all.

    Multiples of the golden ratio keep no step, so that stacked parameters all vary.
    """
    cases = collections.defaultdict(list)
    for item in items:
        if (marker := item.get_closest_marker("sample")) and not item.get_closest_marker("slow"):
            if len(marker.args) != 1:
                raise pytest.UsageError(f"sample needs a number of cases, got {marker.args} at {item.nodeid}")
            cases[marker.args, item.nodeid.partition("[")[0]].append(item)
    for ((count,), _), found in cases.items():
        for at in sorted(range(len(found)), key=lambda at: at * GOLDEN % 1)[count:]:
            found[at].add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Leave what is imported by now out of later collections: with it each takes 0.3 s, and some code asks for many."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def real_threads():
    """Let torch, and kernels that run on its threads, use three threads; no effect where torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
