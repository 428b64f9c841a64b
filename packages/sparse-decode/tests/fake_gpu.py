"""A CUDA device that is not there: torch's fake tensors say that they lie on it, and hold no numbers.

What would wait for the device, or mix devices, raises; what is left is counted. Nothing is launched, so results are
not seen here: the kernels have their host simulator, the arithmetic its tests on the CPU.
"""

import contextlib
import copy
from collections.abc import Iterator
from unittest import mock

import torch
from hashtrain import Hasher
from hashtrain.layers import LayerHasher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import cache_utils
from transformers.integrations import moe

NOTHING = (
    "empty",
    "new_empty",
    "empty_like",
    "detach",
    "alias",
    "_unsafe_view",
    "device",
    "promote_types",
    "lift_fresh",
)
"""Operators that launch nothing, besides views."""


@contextlib.contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Make every new tensor a fake one on CUDA."""
    tensor = torch.tensor

    def without_numbers(data: object, **how: object) -> torch.Tensor:  # of none, torch would ask for a real device
        return torch.empty(0, **how) if data == [] else tensor(data, **how)

    calibrated = mock.patch.object(LayerHasher, "calibrated", property(lambda layer: True))  # it reads numbers
    grouped = mock.patch.object(moe, "_can_use_grouped_mm", return_value=True)  # it asks the device what it is
    empty = mock.patch.object(cache_utils.torch, "tensor", without_numbers)
    with FakeTensorMode() as mode, torch.device("cuda"), calibrated, grouped, empty:
        yield mode


def faked(hasher: Hasher, mode: FakeTensorMode) -> Hasher:
    """Copy a hasher whose weights are fake, in host memory: where a hasher that was loaded has them."""
    known: dict[int, object] = {id(x): mode.from_tensor(x) for x in (*hasher.buffers(), *hasher.parameters())}
    return copy.deepcopy(hasher, known)


class Operators(TorchDispatchMode):
    """Lists the operators that launch something, by name, and the copies between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.launching: list[str] = []
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: OpOverload, types: object, args=(), kwargs=None) -> object:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        places = {x.device.type for x in given + [x for x in [out] if isinstance(x, torch.Tensor)]}
        if len(places) > 1:
            self.copies.append(name)
        if not func.is_view and name not in NOTHING:
            self.launching.append(name)
        return out
