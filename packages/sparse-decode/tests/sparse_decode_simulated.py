"""sparse_decode's CUDA kernels, run on the CPU under hashcore's simulator. Tests that import this need g++."""

import functools
import os
from types import SimpleNamespace

import pytest
import torch
from hashcore import torch_ops
from hashcore.cuda.source import HASHCORE_KERNELS, read_source
from hostsim import Simulator, compiler, guarded
from sparse_decode.cuda import gather, pages

if compiler() is None and os.environ.get("CI") != "true":
    pytest.skip("g++ is needed to run the kernels on the CPU", allow_module_level=True)

KERNELS = {"gather.cu": ("gather", "combine"), "moments.cu": ("add_token",), "encode.cu": ("hash_tokens",)}
KERNELS |= {"place.cu": ("place_codes",), "score.cu": ("list_candidates",), "choose.cu": ("select_64",)}


@functools.cache
def simulator(source, macros):
    return Simulator(read_source(gather.KERNELS, source), list(KERNELS[source]), dict(macros))


def device(order=0):
    """What runs launches in one thread order."""

    def run(launches, device, folder):
        assert folder == gather.KERNELS
        for one in launches:
            simulator(one.source, one.macros).launch(one.kernel, one.grid, (one.threads,), one.arguments, order=order)

    return run


def send_steps(monkeypatch, order=0):
    """Send what a step over pages would launch to the simulator; return the list that the kernels' names go to."""
    kernels = []

    def run(launches, device, folder=HASHCORE_KERNELS):
        for one in launches:
            kernels.append(one.kernel)
            simulator(one.source, one.macros).launch(one.kernel, one.grid, (one.threads,), one.arguments, order=order)

    monkeypatch.setattr("hashcore.cuda.launch.run", run)
    monkeypatch.setattr(pages, "SEARCH", SimpleNamespace(search=torch_ops.on_cuda("search")))
    ours = SimpleNamespace(gather=gather.gather, place_codes=pages.place_codes)
    monkeypatch.setattr(pages, "OPERATORS", ours)
    return kernels


def inside(x):
    """The same tensor between guard pages."""
    bits = x.contiguous().view(torch.int16).numpy() if x.element_size() == 2 else x.contiguous().numpy()
    return torch.from_numpy(guarded(bits)).view(x.dtype)
