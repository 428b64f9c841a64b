"""A CUDA driver that does nothing, so that the host side of launches runs without a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock


@contextlib.contextmanager
def idle_driver(launched: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Send hashcore's launches to a stub that reports success; `launched` is called at each."""
    from hashcore.cuda import launch  # imported here: a script may have to set the path of the packages first

    def start(*_: object) -> tuple[int]:
        launched()
        return (0,)

    config: Callable[[], Any] = SimpleNamespace
    calls = dict.fromkeys(("cuLaunchKernel", "cuLaunchKernelEx"), start)
    driver = SimpleNamespace(CUresult=SimpleNamespace(CUDA_SUCCESS=0), CUlaunchConfig=config, **calls)
    instead = {
        **{"_driver": lambda: driver, "_current_device": lambda: 0, "_current_stream": lambda index: 0},
        **{"_starts_early": lambda index: True, "_bind": lambda index: None, "_programmatic": lambda: None},
        "_function": lambda *_: None,
    }
    with mock.patch.multiple(launch, **instead):
        yield
