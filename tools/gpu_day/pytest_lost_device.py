"""A plug-in of pytest: ends a worker whose CUDA context is lost, so that xdist starts another one in its place."""

import os

import pytest

_failed = False


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _failed
    _failed = _failed or report.failed


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """Look at the device once the report is sent: if it is lost, every later test of this process would fail, too."""
    import torch

    if _failed and os.environ.get("PYTEST_XDIST_WORKER") and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception:  # of a kind that depends on torch's version
            os._exit(70)
