"""Hashers of tensor-parallel ranks: slices by KV head."""

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import HashSelector, QueryHeadHasher
from sparse_serve.served import shard_hasher


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("variant", ["lsh", "paper", "planes", "transform"])
def test_a_slice_of_a_hasher_hashes_its_heads(variant, per_query_head):
    shape = ModelShape(2, 8, 4, 16)
    whole = Hasher(HasherConfig(variant, shape, bits=64, hidden=32))
    if variant == "transform":  # heads that differ
        digits = torch.tensor([[4.0 + head] * 8 + [4.0 - head] * 8 for head in range(4)])
        for layer in (0, 1):
            whole.layer(layer).load_state_dict({**whole.layer(layer).state_dict(), "digits": digits})
    q, k = torch.randn(1, 8, 3, 16), torch.randn(1, 4, 3, 16)
    wrap = QueryHeadHasher if per_query_head else lambda hasher: hasher
    for layer in (0, 1):
        codes = wrap(whole).encode_keys(layer, k).tensor_split(2, dim=1)
        planes = wrap(whole).encode_queries(layer, q)[0].tensor_split(2, dim=1)
        for rank in (0, 1):
            part = wrap(shard_hasher(whole, rank, 2))
            assert torch.equal(part.encode_keys(layer, k.tensor_split(2, dim=1)[rank]), codes[rank])
            assert torch.equal(part.encode_queries(layer, q.tensor_split(2, dim=1)[rank])[0], planes[rank])


def test_a_slice_of_a_hasher_has_the_remainder_of_its_query_heads():
    whole = Hasher(HasherConfig("planes", ModelShape(1, 8, 4, 16)))
    assert HashSelector(shard_hasher(whole, 1, 2)).remainder(0) is None
    whole.layer(0).remainder.copy_(torch.arange(48.0).view(8, 6))
    for rank, heads in ((0, slice(4)), (1, slice(4, 8))):
        assert torch.equal(shard_hasher(whole, rank, 2).remainder(0), whole.remainder(0)[heads])


def test_a_slice_of_a_hasher_whose_layers_differ():
    shape = ModelShape(2, 8, 4, 16, {}, ((8, 4, 16), (8, 2, 32)))
    part = shard_hasher(Hasher(HasherConfig("planes", shape)), 1, 2)
    assert part.config.shape.per_layer == ((4, 2, 16), (4, 1, 32))
    assert part.encode_keys(1, torch.randn(1, 1, 3, 32)).shape[:3] == (1, 1, 3)
