"""Which layers of an engine are sparse, on both backends; the pages and the hasher that they share."""

import gc
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import serve_doubles as doubles
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from serve_doubles import HEADS, SIZE, WORDS, FullAttentionSpec, Impl, Requests, built, engine, impls
from sparse_decode import HashSelector
from sparse_serve.served import Served, shard_hasher
from sparse_serve.settings import Settings

OF_GPU = {"dtype": torch.bfloat16}
WINDOW = {"cpu": {"sliding_window": 64}, "gpu": {"sliding_window": (63, 0)}}


@pytest.fixture(params=["cpu", "gpu"])
def stand(request, asked):
    """A backend; `full`, a spec of its ordinary layers; `made` makes an engine of some layers, and its builders."""
    gpu = request.param == "gpu"
    backend = request.getfixturevalue("gpu_backend" if gpu else "backend")
    kind = OF_GPU if gpu else {}

    def made(layers, settings=asked):
        config, specs = engine(backend, settings, layers)
        return config, specs, built(backend, config, specs)

    return SimpleNamespace(name=request.param, backend=backend, kind=kind, full=FullAttentionSpec(**kind), made=made)


KINDS = {
    "full": (FullAttentionSpec, {}, True),
    "chunks": (doubles.ChunkedLocalAttentionSpec, {}, False),
    "sinks": (doubles.SinkFullAttentionSpec, {}, False),
    "a window": (FullAttentionSpec, {}, False),
    "a window told by the spec": (FullAttentionSpec, {"sliding_window": 64}, False),
    "promoted chunks": (FullAttentionSpec, {"attention_chunk_size": 64}, False),
    "not causal": (FullAttentionSpec, {"non_causal": True}, False),
    "other values": (FullAttentionSpec, {"head_size_v": 16}, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_ordinary_full_attention_is_sparse(kind, stand):
    make, changes, sparse = KINDS[kind]
    spec = make(**stand.kind, **changes)
    config, specs, (builder,) = stand.made([(spec, WINDOW[stand.name] if "window" in kind else {})])
    if kind != "a window":  # which only its impl tells
        assert (specs[0].page_size_bytes > spec.page_size_bytes) == sparse
    assert (impls(config)[0].paged is not None) == sparse
    assert hasattr(builder.build(0, Requests().step({"a": 1})[0]), "spotlight") == sparse


def test_dense_layers_and_engines_that_are_asked_for_nothing_are_vllms(stand):
    config, _, _ = stand.made([(stand.full, {})] * 4)
    assert [impl.paged is not None for impl in impls(config)] == [True, True, True, False]
    assert [impl.paged.layer for impl in impls(config)[:3]] == [0, 1, 2]
    config, specs, _ = stand.made([(stand.full, {})], {})  # beside another
    assert specs == [stand.full]
    assert impls(config)[0].paged is None


def test_what_a_sparse_layer_cannot_do_is_refused(stand):
    for options, words in (({"alibi_slopes": [1.0]}, "attention biases"), ({"shares": "0"}, "layers that share keys")):
        with pytest.raises(ValueError, match=words):
            stand.made([(stand.full, options)])
        stand.made([(doubles.ChunkedLocalAttentionSpec(), options), (stand.full, {})])
    _, _, (builder,) = stand.made([(stand.full, {})])
    with pytest.raises(ValueError, match="needs causal attention"):
        builder.build(0, replace(Requests().step({"a": 1})[0], causal=torch.ones(1)))


def test_what_no_kernel_of_a_gpu_takes_is_refused(gpu_backend, asked):
    for changes, words in (
        ({"block_size": 48}, "a power of two of tokens on a GPU, got 48"),
        ({"dtype": torch.float32}, "needs bfloat16 or float16, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=words):
            built(gpu_backend, *engine(gpu_backend, asked, [(FullAttentionSpec(**(OF_GPU | changes)), {})]))


def test_pages_resized_afterwards_are_refused_before_the_first_request(backend, asked):
    config, specs = engine(backend, asked, [(FullAttentionSpec(), {})])
    needed = specs[0].unpadded_page_size_bytes + 4 * SIZE * HEADS * WORDS
    built(backend, config, [replace(specs[0], page_size_padded=needed)])
    config, specs = engine(backend, asked, [(FullAttentionSpec(), {})])
    with pytest.raises(ValueError, match=f"needs pages of at least {needed} bytes, .*, got {needed - 1}, because"):
        built(backend, config, [replace(specs[0], page_size_padded=needed - 1)])


def test_two_engines_with_equal_settings_share_nothing_and_are_forgotten(stand):
    first, _, _ = stand.made([(stand.full, {})])
    impls(first)[0].paged.selected = 7
    second, specs, _ = stand.made([(stand.full, {})])
    built(stand.backend, second, specs)  # builders are made again when vLLM profiles
    impls(second)[0].paged.selected = 5
    assert [Served.of(x).counts()[0] for x in (first, second)] == [7, 5]
    assert Served.of(first).selector is not Served.of(second).selector
    assert Served.of(second) is Served.latest
    key = id(second.compilation_config)
    assert key in Served._known
    del second, specs, sys.modules["vllm.config"].current
    gc.collect()
    assert key not in Served._known


def test_each_rank_hashes_its_own_heads_as_the_whole_does(tmp_path):
    Hasher(HasherConfig("lsh", ModelShape(3, 4, 2, 16), bits=64), 0).save_pretrained(tmp_path)
    k = torch.randn(9, 2, 16, generator=torch.Generator().manual_seed(1))
    whole = Served(Settings(str(tmp_path))).layer(0, Impl()).encode(k)
    for rank in range(2):
        part = Served(Settings(str(tmp_path)), rank, 2).layer(0, Impl())
        assert torch.equal(part.encode(k[:, rank : rank + 1]), whole[:, rank : rank + 1])
    assert not torch.equal(whole[:, 0], whole[:, 1])


# ---- Hashers of tensor-parallel ranks: slices by KV head ------------------------------------------------------------


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
    for layer in (0, 1):
        codes = HashSelector(whole, per_query_head).encode_keys(layer, k).tensor_split(2, dim=1)
        planes = HashSelector(whole, per_query_head).encode_queries(layer, q)[0].tensor_split(2, dim=1)
        for rank in (0, 1):
            part = HashSelector(shard_hasher(whole, rank, 2), per_query_head)
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
