# ruff: noqa: PT008 the lambdas document the parameters of the functions they replace
"""A simulated CUDA device with values: tensors that report it as their device, and keep their values in host memory.

torch's fake tensors have no values, so they fail at the first read. These do not: every operator runs on the CPU, after
a check that its tensors are on one device, and waits for the device are recorded. Gradients are zero, because autograd
would ask the device for its streams.
"""

import contextlib
import types
from collections.abc import Iterator
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
PROPERTIES = types.SimpleNamespace(name="pretended", major=9, minor=0, multi_processor_count=132, total_memory=1 << 36)
MOVES = ("_to_copy", "to", "copy_")
"""Operators whose tensors may lie on two devices."""
WAITS = ("_local_scalar_dense", "nonzero", "unique", "_unique2", "masked_select", "is_nonzero", "equal")
"""Operators for whose result the host waits."""


class MixedDevices(AssertionError):
    """An operator got tensors on two devices."""


class Pretended(torch.Tensor):
    """A tensor on the simulated device."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Pretended":
        places = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), **places, dtype=inner.dtype, device=CUDA)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called outside pretend_gpu")


class Device(TorchDispatchMode):
    """Runs operators on the CPU, whatever device their tensors report, and records waits and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.copies: list[str] = []
        self.queued: list[str] = []
        self.launches: list[str] = []
        self.pinned: set[int] = set()
        self.beside = False
        self.unfinished: set[int] = set()
        self.generators: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        given = tree_flatten((args, kwargs))[0]
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        ours = any(isinstance(x, Pretended) for x in tensors)
        asked = next((x for x in given if isinstance(x, torch.device)), None)
        there = ours if asked is None else asked.type == "cuda"
        if name == "copy_":
            there = isinstance(args[0], Pretended)
        non_blocking = bool(kwargs.get("non_blocking") or (name == "copy_" and True in args[2:]))
        self._check(name, tensors, ours, there, kwargs.get("generator"), non_blocking)
        pinned = kwargs.get("pin_memory")
        if pinned:
            kwargs = {**kwargs, "pin_memory": False}
        plain = tree_map(_plain, (args, dict(kwargs)))
        found = func(*plain[0], **plain[1])
        if pinned:
            self.pinned.add(found.data_ptr())
        if name == "to" and ours and there and found is plain[0][0]:
            return args[0]  # already there, in that type
        if not there:
            return args[0] if name == "copy_" else found
        wrapped = tree_map(lambda x: Pretended(x) if isinstance(x, torch.Tensor) else x, found)
        if self.beside:
            self.unfinished.add(found.data_ptr())
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if func._schema.is_mutable else wrapped

    def _check(
        self, name: str, tensors: list[torch.Tensor], ours: bool, there: bool, generator: object, non_blocking: bool
    ) -> None:
        """Reject tensors on two devices, except zero-dimensional ones, and record waits."""
        mixed = ours and any(not isinstance(x, Pretended) and x.ndim for x in tensors)
        if mixed and name not in MOVES:
            places = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
            raise MixedDevices(f"{name} got tensors of two devices: {places}")
        if generator is not None and (generator._cdata in self.generators) != there:
            raise MixedDevices(f"{name} draws on one device with the generator of another")
        if self.unfinished.intersection(x.inner.data_ptr() for x in tensors if isinstance(x, Pretended)):
            raise AssertionError(f"{name} got a tensor that another stream has not finished")
        if ours and name in WAITS:
            self.waits.append(name)
        elif mixed or (name in ("_to_copy", "to") and ours != there):
            host = [x for x in tensors if not isinstance(x, Pretended)]
            queued = non_blocking and all(x.data_ptr() in self.pinned for x in host)
            (self.queued if queued else self.copies).append("to" if there else "from")
        elif ours:
            self.launches.append(name)


def _plain(x: object) -> object:
    """Return the argument to use on the CPU."""
    if isinstance(x, torch.device):
        return (
            torch.device("cpu") if x.type == "cuda" else x
        )  # meta stays: models are created there before they are read
    return x.inner if isinstance(x, Pretended) else x


class Stream:
    """A CUDA stream: the current one, or a separate one."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def wait_stream(self, other: "Stream") -> None:
        self.device.unfinished.clear()

    def synchronize(self) -> None:
        self.device.waits.append("synchronize")


@contextlib.contextmanager
def pretend_streams(device: Device) -> Iterator[None]:
    """Simulate streams and pinned memory."""
    kept: list[torch.Tensor] = []  # so that no other tensor gets their addresses

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        assert not isinstance(tensor, Pretended), "memory of the device cannot be pinned"
        kept.append(tensor.clone())
        device.pinned.add(kept[-1].data_ptr())
        return kept[-1]

    @contextlib.contextmanager
    def beside(stream: Stream) -> Iterator[None]:
        device.beside = True
        yield
        device.beside = False

    with (
        mock.patch.object(torch.Tensor, "pin_memory", pin),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
        mock.patch.multiple(torch.cuda, **dict.fromkeys(("Stream", "current_stream"), lambda *_: Stream(device))),
        mock.patch.object(torch.cuda, "stream", beside),
    ):
        yield


@contextlib.contextmanager
def no_inference_tensors() -> Iterator[None]:
    """Replace inference mode by no_grad, wherever it has been imported: its tensors cannot be wrapped."""

    def enter(mode: torch.inference_mode) -> None:
        mode.inside = torch.no_grad()
        mode.inside.__enter__()

    def leave(mode: torch.inference_mode, *error: object) -> None:
        mode.inside.__exit__(*error)

    with mock.patch.multiple(torch.inference_mode, __enter__=enter, __exit__=leave):
        yield


@contextlib.contextmanager
def pretend_gpu() -> Iterator[Device]:
    """Simulate a single CUDA device."""
    make, overwrite = torch.Generator, torch.__future__.get_overwrite_module_params_on_conversion()
    device, kept = Device(), []

    class Generator:  # a class, because modules imported meanwhile use it in annotations
        def __new__(cls, where: object = "cpu") -> torch.Generator:
            made = make()
            if torch.device(where).type == "cuda":
                kept.append(made)  # so that no other generator gets its address
                device.generators.add(made._cdata)
            return made

    plain_list = torch.Tensor.tolist

    def to_list(tensor: torch.Tensor) -> object:
        if isinstance(tensor, Pretended):
            device.waits.append("tolist")
        return plain_list(tensor.inner if isinstance(tensor, Pretended) else tensor)

    def backward(loss: torch.Tensor, *_: object, **__: object) -> None:
        for leaf in leaves(loss):
            leaf.grad = torch.zeros_like(leaf)

    torch._C._ensureCUDADeviceGuardSet()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    answers = {"_lazy_init": None, "is_available": True, "device_count": 1, "current_device": 0}
    answers |= {"is_bf16_supported": True, "is_current_stream_capturing": False}
    answers |= {"get_device_properties": PROPERTIES, "get_device_name": PROPERTIES.name}
    cuda = {name: lambda *_, answer=answer: answer for name, answer in answers.items()}
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(torch, Generator=Generator, tensor=_moved(torch.tensor), as_tensor=_moved(torch.as_tensor)),
        no_inference_tensors(),
        mock.patch.multiple(torch.Tensor, backward=backward, tolist=to_list),
        pretend_streams(device),
        device,
    ):
        try:
            yield device
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrite)


def _moved(make):
    """Wrap a tensor constructor so that it creates on the host first; torch would bypass the simulation."""

    def made(data: object, *, device: object = None, **how: object) -> torch.Tensor:
        if isinstance(data, Pretended):
            return data if device is None else data.to(device)
        where = torch.device(device) if device is not None else torch.empty(0).device
        return make(data, device="cpu", **how).to(CUDA) if where.type == "cuda" else make(data, device=where, **how)

    return made


def leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameters that a loss depends on."""
    seen: set[object] = set()
    found, left = [], [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        left += [after for after, _ in node.next_functions]
    return found
