"""Hashers for distributed models: heads sharded over tensor-parallel ranks, layers placed on several devices."""

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
    """Return the shard of a layer's heads in this process: (rank, size); (0, 1) if not sharded.

    Args:
        module: the layer's attention module; heads: the shape of that layer in the whole model.
    Raises: ValueError if ranks do not have whole KV heads.
    """
    weight = getattr(getattr(module, "k_proj", None), "weight", None)
    if not isinstance(weight, DTensor):
        return 0, 1
    rows, all_rows = weight.to_local().shape[0], heads.num_kv_heads * heads.head_dim
    if rows % heads.head_dim or all_rows % rows:
        raise ValueError(
            f"each tensor-parallel rank must have the same number of whole KV heads, got {heads.num_kv_heads} KV heads "
            f"of {heads.head_dim} and {rows} rows on this rank; use fewer ranks"
        )
    mesh = weight.device_mesh
    return (mesh["tp"] if mesh.ndim > 1 else mesh).get_local_rank(), all_rows // rows


def shard(owner: Any, rank: int, size: int) -> Any:
    """Return the part of a selector or hasher for the heads of one rank.

    Raises: ValueError if it has no method `shard`.
    """
    if isinstance(owner, Hasher):
        return shard_hasher(owner, rank, size)
    if not hasattr(owner, "shard"):
        raise ValueError(
            f"a model sharded over {size} ranks needs a hasher that can be sliced by KV head, got "
            f"{type(owner).__name__}; add a method shard(rank, size) to it"
        )
    return owner.shard(rank, size)


def shard_hasher(hasher: Hasher, rank: int, size: int) -> Hasher:
    """Slice a hasher by KV head; heads are the first dimension of each of its tensors, in the model's order."""
    part = Hasher(replace(hasher.config, shape=shard_shape(hasher.config.shape, size)), seed=None)
    tensors = hasher.state_dict()
    part.load_state_dict({name: x.tensor_split(size)[rank].clone() for name, x in tensors.items()})
    return part.eval().requires_grad_(False)


def shard_shape(shape: ModelShape, size: int) -> ModelShape:
    """Return the shape of one of `size` ranks. Raises: ValueError if KV heads are not divisible by `size`."""
    layers = [shape.at(layer) for layer in range(shape.num_layers)]
    if uneven := [at.num_kv_heads for at in layers if at.num_kv_heads % size]:
        raise ValueError(f"the number of KV heads must be a multiple of the ranks, got {uneven[0]} for {size} ranks")
    return replace(
        shape,
        num_query_heads=shape.num_query_heads // size,
        num_kv_heads=shape.num_kv_heads // size,
        per_layer=tuple((hq // size, hkv // size, d) for hq, hkv, d in shape.per_layer),
    )


class PlacedHasher:
    """A `hashtrain.Hasher` that provides each layer on the device of the keys, copied there if necessary.

    A copy is renewed when the original weights change. Writes to weights that were created in inference mode are not
    noticed, because torch does not count them.
    """

    def __init__(self, hasher: Hasher):
        self.hasher = hasher
        self._copies: dict[tuple[int, torch.device], tuple[_Watch, LayerHasher]] = {}

    def layer(self, index: int, device: torch.device) -> LayerHasher:
        """Return one layer's hash functions on a device."""
        known = self._copies.get((index, device))
        # Versions cannot be read while a graph is compiled.
        if known is not None and (torch.compiler.is_compiling() or known[0].unchanged(self.hasher.layers[index])):
            return known[1]
        own = self.hasher.layer(index)
        if own.remainder.device == device:
            return own
        copied = _copy(own, device)
        encode_cuda.place(copied, own)
        self._copies[index, device] = _Watch(own), copied
        return copied


def _copy(layer: LayerHasher, device: torch.device) -> LayerHasher:
    """Copy a layer's hash functions to a device, copying shared tensors once."""
    # Detached: torch does not convert tensors of inference mode to fake ones.
    there: dict[int, object] = {id(x): x.detach().to(device) for x in layer.buffers()}
    there |= {id(x): torch.nn.Parameter(x.detach().to(device), requires_grad=False) for x in layer.parameters()}
    return cast(LayerHasher, copy.deepcopy(layer, there))


class _Watch:
    """Detects changes of a layer's weights, by identity and by version, which torch increments with every write.

    It runs twice per layer and step, so it reads the modules' dictionaries directly.
    """

    def __init__(self, layer: LayerHasher):
        self._layer = layer
        places = [(x._parameters, x._buffers, x._modules) for x in layer.modules()]
        self._held = [(held, name, held[name]) for three in places for held in three for name in held]
        tensors = [x for *_, x in self._held if isinstance(x, torch.Tensor)]
        self._storages = [x.untyped_storage() for x in tensors]  # kept alive, so that their addresses are not reused
        self._at = [(x, held._cdata) for x, held in zip(tensors, self._storages, strict=True)]
        self._versions = [(x, x._version) for x in tensors if not x.is_inference()]

    def unchanged(self, layer: LayerHasher) -> bool:
        """Whether `layer` is the watched layer, with unchanged weights."""
        if layer is not self._layer:
            return False
        held = all(held[name] is x for held, name, x in self._held)
        written = any(x._version != version for x, version in self._versions)
        return held and not written and all(x.untyped_storage()._cdata == at for x, at in self._at)
