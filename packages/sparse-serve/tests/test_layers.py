"""Which layers of an engine are sparse."""

import gc
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from serve_engine import (
    DIM,
    HEADS,
    SIZE,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SinkFullAttentionSpec,
    built,
    engine,
    impls,
)
from sparse_serve.served import Served

KINDS = {
    "full": (FullAttentionSpec(), {}, True),
    "chunks": (ChunkedLocalAttentionSpec(), {}, False),
    "sinks": (SinkFullAttentionSpec(), {}, False),
    "a window": (FullAttentionSpec(), {"sliding_window": 64}, False),
    "a window told by the spec": (FullAttentionSpec(sliding_window=64), {"sliding_window": 64}, False),
    "promoted chunks": (FullAttentionSpec(attention_chunk_size=64), {}, False),
    "not causal": (FullAttentionSpec(non_causal=True), {}, False),
    "other values": (FullAttentionSpec(head_size_v=8), {}, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_ordinary_full_attention_is_sparse(kind, backend, asked):
    spec, options, sparse = KINDS[kind]
    config, specs = engine(backend, asked, [(spec, options)])
    (builder,), (impl,) = built(backend, config, specs), impls(config)
    if kind != "a window":  # which only its impl tells
        assert (specs[0].page_size_bytes > spec.page_size_bytes) == sparse
    common = SimpleNamespace(
        query_start_loc=torch.tensor([0, 1]),
        seq_lens=torch.tensor([5]),
        block_table=torch.tensor([[0]]),
        slot_mapping=torch.tensor([4]),
        is_prefilling=None,
        causal=True,
    )
    assert hasattr(builder.build(0, common), "spotlight") == sparse
    if sparse:
        assert impl._paged is not None
        return
    cache = torch.zeros(1, HEADS, SIZE, 2 * DIM)
    q, k, v = torch.randn(1, 2 * HEADS, DIM), *torch.randn(2, 1, HEADS, DIM)
    impl.forward(None, q, k, v, cache, common, output=torch.zeros_like(q))
    assert impl.calls == ["update", "forward"]


def test_a_layer_of_the_dense_ones_stays_vllms(backend, asked):
    config, specs = engine(backend, asked, [(FullAttentionSpec(), {})] * 4)
    built(backend, config, specs)
    assert [impl._paged is not None for impl in impls(config)] == [True, True, True, False]
    assert [impl._paged.layer for impl in impls(config)[:3]] == [0, 1, 2]


def test_an_engine_that_is_asked_for_nothing_is_vllms(backend):
    config, specs = engine(backend, {}, [(FullAttentionSpec(), {})])
    built(backend, config, specs)
    assert specs == [FullAttentionSpec()]
    assert impls(config)[0]._paged is None


def test_pages_resized_afterwards_are_refused_before_the_first_request(backend, asked):
    config, specs = engine(backend, asked, [(FullAttentionSpec(), {})])
    needed = specs[0].unpadded_page_size_bytes + 4 * SIZE * HEADS * 2
    built(backend, config, [replace(specs[0], page_size_padded=needed)])
    config, specs = engine(backend, asked, [(FullAttentionSpec(), {})])
    with pytest.raises(ValueError, match=f"needs pages of at least {needed} bytes, .*, got {needed - 1}, because"):
        built(backend, config, [replace(specs[0], page_size_padded=needed - 1)])


@pytest.mark.parametrize(
    ("options", "words"), [({"alibi_slopes": [1.0]}, "attention biases"), ({"shares": "0"}, "layers that share keys")]
)
def test_what_a_sparse_layer_cannot_do_is_refused(options, words, backend, asked):
    config, specs = engine(backend, asked, [(FullAttentionSpec(), options)])
    with pytest.raises(ValueError, match=words):
        built(backend, config, specs)
    other = [(ChunkedLocalAttentionSpec(), options), (FullAttentionSpec(), {})]
    built(backend, *engine(backend, asked, other))


def test_a_step_that_is_not_causal_is_refused(backend, asked):
    (builder,) = built(backend, *engine(backend, asked, [(FullAttentionSpec(), {})]))
    with pytest.raises(ValueError, match="needs causal attention"):
        builder.build(0, SimpleNamespace(causal=torch.ones(1)))


def test_two_engines_with_equal_settings_share_nothing(backend, asked):
    first, specs = engine(backend, asked, [(FullAttentionSpec(), {})])
    built(backend, first, specs)
    impls(first)[0]._paged.selected = 7
    second, specs = engine(backend, asked, [(FullAttentionSpec(), {})])
    built(backend, second, specs)
    built(backend, second, specs)  # builders are made again when vLLM profiles
    impls(second)[0]._paged.selected = 5
    assert [Served.of(x).counts()[0] for x in (first, second)] == [7, 5]
    assert Served.of(first).selector is not Served.of(second).selector


def test_an_engine_beside_another_asks_for_its_own_pages(backend, asked):
    engine(backend, asked, [(FullAttentionSpec(), {})])
    assert engine(backend, {}, [(FullAttentionSpec(), {})])[1] == [FullAttentionSpec()]


def test_an_engine_that_has_ended_is_forgotten(backend, asked):
    config, _ = engine(backend, asked, [(FullAttentionSpec(), {})])
    key = id(config.compilation_config)
    assert Served.of(config) is Served.latest
    assert key in Served._known
    del config, sys.modules["vllm.config"].current
    gc.collect()
    assert key not in Served._known
