"""sparse_decode's CUDA kernels, run on the CPU under hashcore's simulator. Tests that import this need g++."""

import functools
import os

import pytest
import torch
from hashcore.cuda.source import HASHCORE_KERNELS, read_source
from hostsim import Simulator, compiler, guarded
from sparse_decode.cuda import gather

if compiler() is None and os.environ.get("CI") != "true":
    pytest.skip("g++ is needed to run the kernels on the CPU", allow_module_level=True)

KERNELS = {
    "gather.cu": ("gather", "combine"),
    "moments.cu": ("add_token",),
    "encode.cu": ("hash_tokens",),
    "place.cu": ("place_codes",),
}
SEARCH = {"score.cu": ("list_candidates",), "choose.cu": ("select_64",)}


@functools.cache
def simulator(source, macros):
    return Simulator(read_source(gather.KERNELS, source), list((KERNELS | SEARCH)[source]), dict(macros))


def device(order=0, broken=None):
    """What runs launches in one thread order; `broken` is a simulator of changed sources."""

    def run(launches, device, folder):
        assert folder == gather.KERNELS
        for one in launches:
            kernels = broken or simulator(one.source, one.macros)
            kernels.launch(one.kernel, one.grid, (one.threads,), one.arguments, order=order)

    return run


def steps(order=0):
    """What runs the launches of searches and of our own kernels, and lists the kernels' names in `kernels`."""
    kernels = []

    def run(launches, device, folder=HASHCORE_KERNELS):
        for one in launches:
            kernels.append(one.kernel)
            simulator(one.source, one.macros).launch(one.kernel, one.grid, (one.threads,), one.arguments, order=order)

    run.kernels = kernels
    return run


def inside(x):
    """The same tensor between guard pages."""
    bits = x.contiguous().view(torch.int16).numpy() if x.element_size() == 2 else x.contiguous().numpy()
    return torch.from_numpy(guarded(bits)).view(x.dtype)
