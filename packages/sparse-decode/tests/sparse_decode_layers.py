"""Coded cache layers of every kind, what may be done to them, and the law that they must keep."""

import hashcore
import torch
from sparse_decode.caches.cache import CodedDynamicLayer, CodedStaticLayer
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.caches.cache_types import carry_codes
from sparse_decode.caches.offload import HostLayer
from sparse_decode.sums import Sums, means_of_rows
from transformers.cache_utils import DynamicLayer, StaticLayer

WEIGHTS = torch.randint(0, 2, (2, 16, 128), generator=torch.Generator().manual_seed(0)).float() * 2 - 1
ROOM = 64
KINDS = {
    "dynamic": (DynamicLayer, CodedDynamicLayer),
    "host": (DynamicLayer, HostLayer),
    "static": (lambda: StaticLayer(ROOM), CodedStaticLayer),
}
RESIZABLE = ("dynamic", "host")


def encode(k):
    return hashcore.pack(k @ WEIGHTS)  # whole numbers times signs: exact


def make(kind, encoder=None):
    plain, coded = KINDS[kind]
    return carry_codes(plain(), encoder or Encoder(encode), coded)


def cached_keys(layer):
    """The keys the layer would attend to, and their number."""
    length = int(layer.get_seq_length())
    return layer.keys[:, :, :length]


def check(layer):
    length = int(layer.get_seq_length())
    if length:
        assert layer.codes.shape[2] == (ROOM if isinstance(layer, StaticLayer) else length)
        assert torch.equal(layer.codes[:, :, :length], encode(cached_keys(layer)))
    elif isinstance(layer, CodedDynamicLayer):
        assert not layer._codes.length


def update(layer, tokens, seed, batch=2):
    # Cropped to nothing, or static, a layer keeps its batch size.
    batch = layer.keys.shape[0] if layer.is_initialized and layer.keys.dim() == 4 else batch
    k, v = torch.randint(-4, 5, (2, batch, 2, tokens, 16), generator=torch.Generator().manual_seed(seed)).float()
    before = int(layer.get_seq_length())
    keys, values = layer.update(k, v)
    assert int(layer.get_seq_length()) == before + tokens
    assert torch.equal(keys[:, :, before : before + tokens], k)
    assert torch.equal(values[:, :, before : before + tokens], v)


def stored(layer):
    """The keys and values the layer would attend to."""
    length = int(layer.get_seq_length())
    return layer.keys[:, :, :length], layer.values[:, :, :length]


def check_means(layer, padding, rows):
    """The running sums of the last rows are those of the whole cache: exactly, on whole numbers, but for the spread."""
    (k, v), length = stored(layer), int(layer.get_seq_length())
    first = max(0, length - rows)
    q = torch.randn(len(k), 4, length - first, k.shape[3], generator=torch.Generator().manual_seed(1))
    found = []
    for sums in (layer.sums, Sums()):
        before = sums.advance(k, v, padding, first, k.device)
        found.append(means_of_rows(before, q, torch.ones(4), k, v, padding, first, length))
        sums.advance(k, v, padding, length, k.device)
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-5)


ACTS = {
    "update": lambda layer: update(layer, 3, 1, layer.codes.shape[0]),
    "crop": lambda layer: layer.crop(-2),
    "reorder_cache": lambda layer: layer.reorder_cache(torch.arange(layer.codes.shape[0]).flip(0)),
    "batch_repeat_interleave": lambda layer: layer.batch_repeat_interleave(2),
    "batch_select_indices": lambda layer: layer.batch_select_indices(torch.tensor([1])),
    "reset": lambda layer: layer.reset(),
}


def check_all(layer):
    check(layer)
    check_means(layer, None, 1)
