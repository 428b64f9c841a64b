"""Which layers of an engine are sparse: decided once, by their cache specs, on stand-ins for vLLM."""

import gc
import importlib
import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_serve.served import Served

SIZE, HEADS, DIM = 32, 2, 16
MODULES = ["vllm", "vllm._custom_ops", "vllm.config", "vllm.model_executor", "vllm.model_executor.models"]
MODULES += ["vllm.model_executor.models.utils", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"]
MODULES += ["vllm.v1.attention.backends.cpu_attn", "vllm.v1.kv_cache_interface"]


@dataclass(frozen=True)
class Spec:
    """A cache spec of vLLM, as far as it is used."""

    block_size: int = SIZE
    num_kv_heads: int = HEADS
    head_size: int = DIM
    head_size_v: int = DIM
    page_size_padded: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    @property
    def unpadded_page_size_bytes(self):
        return 4 * self.block_size * self.num_kv_heads * (self.head_size + self.head_size_v)

    @property
    def page_size_bytes(self):
        return self.page_size_padded or self.unpadded_page_size_bytes


class FullAttentionSpec(Spec):
    """Ordinary full attention."""


class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention that is something else, too."""


class ChunkedLocalAttentionSpec(Spec):
    """Attention within chunks, as in Llama 4; its layers are built like those of full attention."""


class Impl:
    """vLLM's attention: records what it is called for."""

    def __init__(self, sliding_window=None, alibi_slopes=None, shares=None):
        self.num_heads, self.head_size, self.scale, self.logits_soft_cap = 2 * HEADS, DIM, 0.25, 0.0
        self.sliding_window = -1 if sliding_window is None else sliding_window
        self.attn_type, self.alibi_slopes, self.sinks = "decoder", alibi_slopes, None
        self.kv_sharing_target_layer_name, self.calls = shares, []

    def do_kv_cache_update(self, *given):
        self.calls.append("update")

    def forward(self, *given, **more):
        self.calls.append("forward")
        return given[-1] if given else None


class Builder:
    """vLLM's builder of metadata."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.block_size = kv_cache_spec, kv_cache_spec.block_size

    def build(self, common_prefix_len, common, fast_build=False):
        return common


class Compilation:
    """The compilation config of an engine, which holds its layers."""

    def __init__(self):
        self.static_forward_context = {}


class Config:
    """The config of an engine."""

    def __init__(self, asked):
        self.additional_config = asked
        self.compilation_config = Compilation()
        self.parallel_config = SimpleNamespace(tensor_parallel_size=1)


@pytest.fixture
def backend(monkeypatch):
    """Our backend, on stand-ins for vLLM's modules."""
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"]._custom_ops = sys.modules["vllm._custom_ops"]
    sys.modules["vllm.config"].get_current_vllm_config = lambda: sys.modules["vllm.config"].current
    sys.modules["vllm.model_executor.models.utils"].extract_layer_index = int
    stock = sys.modules["vllm.v1.attention.backends.cpu_attn"]
    stock.CPUAttentionBackend, stock.CPUAttentionBackendImpl, stock.CPUAttentionMetadataBuilder = object, Impl, Builder
    sys.modules["vllm.v1.kv_cache_interface"].FullAttentionSpec = FullAttentionSpec
    monkeypatch.delitem(sys.modules, "sparse_serve._backend", raising=False)
    monkeypatch.setattr(Served, "latest", None)
    yield importlib.import_module("sparse_serve._backend")
    sys.modules.pop("sparse_serve._backend")


@pytest.fixture
def asked(tmp_path):
    Hasher(HasherConfig("lsh", ModelShape(4, 4, HEADS, DIM), bits=64), 0).save_pretrained(tmp_path)
    return {"spotlight": {"hasher": str(tmp_path), "dense_layers": [3]}}


def engine(backend, asked, layers):
    """Create an engine's layers as vLLM does: all layers, then their specs, then a builder for each spec."""
    config = sys.modules["vllm.config"].current = Config(asked)
    for index, (_, options) in enumerate(layers):
        impl = backend.SpotlightImpl(**options)
        config.compilation_config.static_forward_context[str(index)] = SimpleNamespace(impl=impl)
    specs = [backend.SpotlightBackend.customize_spec(spec) for spec, _ in layers]
    return config, specs


def built(backend, config, specs):
    made = []
    for index, spec in enumerate(specs):
        made.append(backend.SpotlightBuilder(spec, [str(index)], config, torch.device("cpu")))
    return made


def impls(config):
    return [layer.impl for layer in config.compilation_config.static_forward_context.values()]


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
        is_prefilling=None,
        causal=True,
    )
    assert hasattr(builder.build(0, common), "spotlight") == sparse
    if sparse:
        assert impl._paged is not None
        return
    impl.do_kv_cache_update(None, None, None, None, None)
    impl.forward(None, None, None, None, None, "metadata", output=None)
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
    before = len(Served._known)
    assert Served.of(config) is Served.latest
    del config, sys.modules["vllm.config"].current
    gc.collect()
    assert len(Served._known) == before - 1
