"""A layer's hash functions on a device, as the kernels read them: placed and described once for each layer.

Which weights a hash function has is told by their number (`NAMES`), and the other numbers of a call by shapes.
"""

import copy
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from hashcore.cuda.source import structure
from hashcore.quantiser import group_weights
from hashtrain.layers import LayerHasher
from hashtrain.layers.paper import Paper
from hashtrain.layers.planes import Planes
from hashtrain.layers.rotations import Linear, Lsh
from hashtrain.layers.transform import Transform
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sparse_decode.cpu.encode import Views, views_of
from sparse_decode.cuda.gather import KERNELS

MOST = 512
"""The largest head_dim, width of the hidden layer and number of bits that the kernel supports."""
MOST_GROUPS = 256
"""Maximal number of output heads."""
NAMES = {1: ("r",), 3: ("w1", "b1", "w2"), 4: ("w1", "b1", "w2", "b2"), 5: ("r", "w1", "b1", "w2", "b2")}
"""The weights of a hash function by their number: linear; the paper's; the paper's with its residuals; a linear part
and an MLP. R [F, D, C], W1 [F, D, M], b1 [F, 1, M], W2 [F, M, C], b2 [F, 1, C] for F heads."""
MATRICES = ("r", "w1", "w2")
"""Weights that may be float16; the others are float32."""
_VARIANTS = Planes, Transform, Lsh, Linear, Paper


Functions: Any = structure(KERNELS, "encode.cu", "Functions")
Digits: Any = structure(KERNELS, "encode.cu", "Digits")


class Side(NamedTuple):
    """The functions of keys or of queries, as kernels/encode.cu takes them; narrow: whether matrices have 16 bits."""

    functions: Any  # Functions
    digits: Any  # Digits
    narrow: Literal["0", "1"]


def describe(weights: Sequence[Tensor], digits: Sequence[Tensor]) -> Side:
    """Return the kernel's arguments for weights and digits."""
    named = dict(zip(NAMES[len(weights)], weights, strict=True))
    first, last = named.get("w1", weights[0]), named.get("w2", weights[0])
    (heads, dim), out, hidden = first.shape[:2], last.shape[2], first.shape[2] if "w1" in named else 0
    addresses = (named[name].data_ptr() if name in named else None for name in NAMES[5])
    functions = Functions(*addresses, heads, dim, hidden, out, len(weights) == 4)
    described = Digits(*(x.data_ptr() for x in digits), *digits[0].shape) if digits else Digits(heads=0, bits=out)
    return Side(functions, described, "1" if first.dtype == torch.float16 else "0")


class How(NamedTuple):
    """How the planes of a query come from its heads' functions.

    Attributes: bits: of one code; group: query heads whose functions are summed; planes: binary digits of the sum's
        levels; 0: of the number of heads whose function is positive (eq. 3); join: groups side by side (eq. 2).
    """

    bits: int
    group: int
    planes: int
    join: int = 1


class Placed(NamedTuple):
    """A layer's hash functions, and what the kernels need of them; their tensors are never replaced.

    Attributes: views: the functions as arrays, for the CPU's kernel; None if it does not support them. The others are
        for CUDA's: hows: how planes come from the functions, per KV head and per query head; planes: the weights of
        these planes; fits: whether it supports the functions.
    """

    layer: LayerHasher
    views: Views | None = None
    key: Sequence[Tensor] = ()
    query: Sequence[Tensor] = ()
    digits: Sequence[Tensor] = ()
    hows: tuple[How, ...] = ()
    planes: tuple[tuple[int, ...], ...] = ()
    fits: bool = False


def place(layer: LayerHasher, device: torch.device) -> Placed:
    """Return a layer's hash functions on a device: copies of its tensors there, or the same memory.

    If all matrices in host memory are float16 numbers, CUDA's kernel reads them as such, half the bytes, and computes
    the same.
    """
    found = found_in(copied(layer, device))
    if not found.key or device.type == "cpu":
        return found
    if _is_narrow(layer):
        return found._replace(key=_narrowed(found.key), query=_narrowed(found.query))
    return found


def found_in(layer: LayerHasher) -> Placed:
    """Return what the kernels need of a layer whose tensors are not replaced from now on."""
    if type(layer) not in _VARIANTS:
        return Placed(layer)
    ways, weights = hows(layer), (weights_of(layer, "key"), weights_of(layer, "query"))
    # The weights of a query's planes.
    one, many = (tuple(1 << p for p in range(how.planes)) or group_weights(how.group) for how in ways)
    digits = [layer.coordinate, layer.power, layer.limit] if isinstance(layer, Transform) else []
    return Placed(layer, views_of(layer), *weights, digits, ways, (one, many), are_supported(layer))


def hows(layer: LayerHasher) -> tuple[How, How]:
    """Return how planes come from a layer's functions, per KV head and per query head."""
    planes = getattr(layer, "planes", 0)
    together = How(layer.bits, 1, 0, layer.group) if isinstance(layer, Paper) else How(layer.bits, layer.group, planes)
    return together, How(layer.bits, 1, planes)


def code_shape(layer: LayerHasher, per_query_head: bool) -> tuple[int, int]:
    """Return the heads and int32 words of a key's codes."""
    words = layer.bits // 32
    if per_query_head:
        return layer.hq, words
    return layer.hkv, words * (layer.group if isinstance(layer, Paper) else 1)


def weights_of(layer: LayerHasher, side: Literal["key", "query"]) -> list[Tensor]:
    """Return the weights of the functions of keys or of queries, as `NAMES` has them."""
    if isinstance(layer, Lsh):
        found = [layer.rotation]
    else:
        owner: nn.Module = layer if isinstance(layer, Paper) else getattr(layer, side)
        names = NAMES[3 + layer.residual] if isinstance(layer, Paper) else NAMES[5]
        found = [getattr(owner, name) for name in names]
    return [x.detach() if x.requires_grad else x for x in found]  # avoid views, which are slow


def are_supported(layer: LayerHasher) -> bool:
    """Whether the kernel supports a layer's functions."""
    if type(layer) not in _VARIANTS or layer.remainder.dtype != torch.float32:
        return False
    owner: Any = layer if isinstance(layer, Paper) else getattr(layer, "key", None)
    hidden, out = (0, 0) if isinstance(layer, Lsh) else (owner.w1.shape[2], owner.w2.shape[2])
    if hidden % 4 or out % 4:  # the kernel reads four columns at once
        return False
    return max(layer.d, layer.bits, hidden) <= MOST and layer.hkv <= MOST_GROUPS


def matrices(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the matrices among the weights of one side."""
    return [x for name, x in zip(NAMES[len(weights)], weights, strict=True) if name in MATRICES]


def _is_narrow(layer: LayerHasher) -> bool:
    """Whether all matrices of a layer in host memory are float16 numbers; False for fake ones."""
    found = [x for side in ("key", "query") for x in matrices(weights_of(layer, side))]
    if any(isinstance(x, FakeTensor) or x.device.type != "cpu" for x in found):
        return False
    rounded = [x.half().float() for x in found]
    if any(isinstance(x, FakeTensor) for x in rounded):  # in a mode that makes all results fake
        return False
    return all(map(torch.equal, found, rounded))


def _narrowed(weights: Sequence[Tensor]) -> list[Tensor]:
    return [x.half() if name in MATRICES else x for name, x in zip(NAMES[len(weights)], weights, strict=True)]


def copied(layer: LayerHasher, device: torch.device) -> LayerHasher:
    """Copy a layer's hash functions to a device, copying shared tensors once."""
    # Detached: torch does not convert tensors of inference mode to fake ones.
    there: dict[int, object] = {id(x): x.detach().to(device) for x in layer.buffers()}
    there |= {id(x): torch.nn.Parameter(x.detach().to(device), requires_grad=False) for x in layer.parameters()}
    return cast(LayerHasher, copy.deepcopy(layer, there))
