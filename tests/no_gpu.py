"""A plug-in of pytest: runs the tests that need a GPU on the CPU, the first of each function.

Nothing else runs them, so that without this their calls would go out of date. It shows that they fit the code, and
nothing about CUDA.

    python -m pytest -p tests.no_gpu -m cuda packages/sparse-decode/tests/test_on_gpu.py
"""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

LEFT_OUT = (
    *("graph", "not_loaded_during_a_capture", "work_waits", "errors_are_raised"),  # graphs, streams, a second device
    # Operators of CUDA alone, which test_paged.py, test_encode.py and test_step.py call with their kernels.
    *("codes_go_to_their_slots", "over_pages", "hashed_tokens"),
    *("every_time", "compiles_whole"),  # slow, and would show nothing
)
"""Parts of the names of tests that the CPU cannot take."""
CPU = torch.device("cpu")


class OnTheCpu(TorchFunctionMode):
    """Makes every tensor in host memory, wherever it is asked for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        given = {name: _moved(value) for name, value in (kwargs or {}).items()}
        return func(*map(_moved, args), **given)


def _moved(value: object) -> object:
    named = isinstance(value, torch.device) and value.type == "cuda"
    return CPU if named or value == "cuda" else value


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let no test be skipped because there is no GPU."""
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        return (yield)


@pytest.hookimpl(trylast=True)  # after those that are not selected have left
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Keep the first test of each function."""
    first = {(item.path, item.originalname): item for item in reversed(items)}
    items[:] = [x for x in items if x in first.values() and not any(name in x.name for name in LEFT_OUT)]
    for item in items:
        if hasattr(item.module, "DEVICE"):
            item.module.DEVICE = CPU


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Put the CPU in place of the GPU."""
    with OnTheCpu(), mock.patch.object(torch.cuda, "set_sync_debug_mode"):
        return (yield)
