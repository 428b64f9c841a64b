"""Prefill: hashing, packing and the means make no float32 copy of all keys."""

import tracemalloc

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import HashSelector, sums
from sparse_decode.caches import cache_encoder
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.caches.cache_types import carry_codes
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicLayer, StaticLayer

HEADS, DIM = 2, 64
BITS = 128


class LargestFloats(TorchDispatchMode):
    """Remembers the bytes of the largest tensor of float32 or float64 that an operation returned."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and x.dtype in (torch.float32, torch.float64):
                self.nbytes = max(self.nbytes, x.nbytes)
        return out


def prefill(kind, k, v):
    selector = HashSelector(Hasher(HasherConfig("planes", ModelShape(1, 2 * HEADS, HEADS, DIM), bits=BITS)))
    plain = DynamicLayer() if kind is DynamicLayer else StaticLayer(max_cache_len=k.shape[2] + 8)
    layer = carry_codes(plain, Encoder(lambda keys: selector.encode_keys(0, keys)))
    layer.update(k, v)
    layer.sums.advance(k, v, None, k.shape[2], k.device)
    layer.sums.drop(k, v, 1)


@pytest.mark.parametrize("kind", [DynamicLayer, StaticLayer])
@pytest.mark.parametrize(("batch", "tokens", "chunk"), [(1, 4096, 1 << 18), (4, 1024, 1 << 18), (32, 1024, 1 << 21)])
def test_no_temporary_grows_with_the_context_or_the_batch(monkeypatch, kind, batch, tokens, chunk):
    monkeypatch.setattr(cache_encoder, "_CHUNK", chunk)  # bytes
    monkeypatch.setattr(sums, "_CHUNK", chunk)
    k, v = torch.randn(2, batch, HEADS, tokens, DIM).bfloat16()
    with LargestFloats() as largest:
        prefill(kind, k, v)
    weights = batch * HEADS * BITS * BITS * 4  # torch repeats a batched product's second factor
    assert 0 < largest.nbytes <= max(chunk, weights) < k.numel() * 4
    tracemalloc.start()  # what numpy allocates
    prefill(kind, k, v)
    codes = batch * HEADS * tokens * BITS // 8
    assert tracemalloc.get_traced_memory()[1] < 4 * chunk + 4 * codes
    tracemalloc.stop()
