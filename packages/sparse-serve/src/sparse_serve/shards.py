"""Hashers for the heads of one tensor-parallel rank."""

from dataclasses import replace

from hashtrain import Hasher, ModelShape


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
