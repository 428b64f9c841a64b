"""Hashers and selectors for distributed models: heads sharded over tensor-parallel ranks."""

from dataclasses import replace
from typing import Any

from hashtrain import Hasher, ModelShape
from torch.distributed.tensor import DTensor


def head_shard(module: Any, heads: ModelShape) -> tuple[int, int]:
    """Return the shard of a layer's heads in this process: (rank, size); (0, 1) if not sharded.

    Args: heads: the shape of that layer in the whole model.
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
    """Return the part of a selector or hasher for the heads of one rank. Raises: ValueError if it has no `shard`."""
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
    shares = tuple(own[len(own) // size * rank :][: len(own) // size] for own in hasher.head_shares)
    shape = shard_shape(hasher.config.shape, size)
    part = Hasher(replace(hasher.config, shape=shape, head_shares=shares), seed=None)
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
