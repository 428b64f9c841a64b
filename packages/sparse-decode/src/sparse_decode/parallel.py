"""Hashers where the model is spread out: heads over tensor-parallel ranks, layers over devices."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import torch
from hashtrain import Hasher, ModelShape
from hashtrain.layers import LayerHasher
from torch.distributed.tensor import DTensor

from sparse_decode import encode_cuda


def head_shard(module: Any, heads: ModelShape) -> tuple[int, int]:
    """Return which part of a layer's heads this process holds: (rank, size), (0, 1) if all.

    Args:
        module: the layer's attention module; heads: the shape of that layer in the whole model.
    Raises: ValueError if a rank holds no whole KV head.
    """
    weight = getattr(getattr(module, "k_proj", None), "weight", None)
    if not isinstance(weight, DTensor):
        return 0, 1
    rows, all_rows = weight.to_local().shape[0], heads.num_kv_heads * heads.head_dim
    if rows % heads.head_dim or all_rows % rows:
        raise ValueError(
            f"tensor parallel ranks must hold whole KV heads, as many each, got {heads.num_kv_heads} KV heads of "
            f"{heads.head_dim} and {rows} rows here; use fewer ranks"
        )
    mesh = weight.device_mesh
    return (mesh["tp"] if mesh.ndim > 1 else mesh).get_local_rank(), all_rows // rows


def shard(owner: Any, rank: int, size: int) -> Any:
    """Return the part of a selector or hasher that belongs to the heads of one rank.

    Raises: ValueError if it does not say how it is sliced.
    """
    if isinstance(owner, Hasher):
        return shard_hasher(owner, rank, size)
    if not hasattr(owner, "shard"):
        raise ValueError(
            f"a model split over {size} ranks needs a hasher that can be sliced by KV head, got "
            f"{type(owner).__name__}; give it a method shard(rank, size)"
        )
    return owner.shard(rank, size)


def shard_hasher(hasher: Hasher, rank: int, size: int) -> Hasher:
    """Slice a hasher by KV head: every tensor of it has heads first, in the order of the model's."""
    part = Hasher(replace(hasher.config, shape=shard_shape(hasher.config.shape, size)), seed=None)
    tensors = hasher.state_dict()
    part.load_state_dict({name: x.tensor_split(size)[rank].clone() for name, x in tensors.items()})
    return part.eval().requires_grad_(False)


def shard_shape(shape: ModelShape, size: int) -> ModelShape:
    """Return the shape of what one of `size` ranks holds. Raises: ValueError if the KV heads do not divide."""
    layers = [shape.at(layer) for layer in range(shape.num_layers)]
    if uneven := [at.num_kv_heads for at in layers if at.num_kv_heads % size]:
        raise ValueError(f"KV heads must divide among {size} ranks, got {uneven[0]}")
    return replace(
        shape,
        num_query_heads=shape.num_query_heads // size,
        num_kv_heads=shape.num_kv_heads // size,
        per_layer=tuple((hq // size, hkv // size, d) for hq, hkv, d in shape.per_layer),
    )


class PlacedHasher:
    """A `hashtrain.Hasher` whose layers are found on the device of the keys; copied there if they are not.

    A copy is made anew when the weights it was made of have changed; writes to weights that were made in inference mode
    go unnoticed, because torch does not count them.
    """

    def __init__(self, hasher: Hasher):
        self.hasher = hasher
        self._copies: dict[tuple[int, torch.device], tuple[_Watch, LayerHasher]] = {}

    def layer(self, index: int, device: torch.device) -> LayerHasher:
        """Return one layer's hash functions on a device."""
        known = self._copies.get((index, device))
        # Versions cannot be read while a graph is compiled.
        if known is not None and (torch.compiler.is_compiling() or known[0].unchanged(self.hasher.layer(index))):
            return known[1]
        own = self.hasher.layer(index)
        if own.remainder.device == device:
            return own
        copied = _copy(own, device)
        encode_cuda.place(copied)
        self._copies[index, device] = _Watch(own), copied
        return copied


def _copy(layer: LayerHasher, device: torch.device) -> LayerHasher:
    """Copy a layer's hash functions to a device: each tensor goes there once."""
    there: dict[int, object] = {id(x): x.to(device) for x in layer.buffers()}
    there |= {id(x): torch.nn.Parameter(x.detach().to(device), requires_grad=False) for x in layer.parameters()}
    return cast(LayerHasher, copy.deepcopy(layer, there))


class _Watch:
    """Tells whether the weights of a layer are those it had: torch counts up a tensor's version with every write.

    It is asked twice a layer and step, so it looks where a module keeps its tensors and does not ask the module.
    """

    def __init__(self, layer: LayerHasher):
        self._layer = layer
        places = [(x._parameters, x._buffers, x._modules) for x in layer.modules()]
        self._held = [(held, name, held[name]) for three in places for held in three for name in held]
        tensors = [x for *_, x in self._held if isinstance(x, torch.Tensor)]
        self._storages = [x.untyped_storage() for x in tensors]  # so that no other gets one of their addresses
        self._at = [(x, held._cdata) for x, held in zip(tensors, self._storages, strict=True)]
        self._versions = [(x, x._version) for x in tensors if not x.is_inference()]

    def unchanged(self, layer: LayerHasher) -> bool:
        """Say so of the layer that is in its place now."""
        if layer is not self._layer:
            return False
        held = all(held[name] is x for held, name, x in self._held)
        written = any(x._version != version for x, version in self._versions)
        return held and not written and all(x.untyped_storage()._cdata == at for x, at in self._at)
