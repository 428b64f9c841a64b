"""A plug-in of pytest: ends a worker whose CUDA context is lost, so that xdist starts another one in its place."""

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

_lost = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Look at the device after each failure: once it is lost, every later test of this process would fail, too."""
    global _lost
    report = yield
    torch = sys.modules.get("torch")
    if report.failed and torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception as error:  # of a kind that depends on torch's version
            _lost = True
            report.longrepr = f"{report.longreprtext}\nCUDA CONTEXT LOST: {error}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """End the worker after the report has been sent."""
    if _lost and os.environ.get("PYTEST_XDIST_WORKER"):
        os._exit(70)
