"""The GPU backend on stand-ins for vLLM: results under the host simulator, launches with fake CUDA tensors."""

import copy
import functools
import importlib
import sys
import types
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import serve_engine
import torch
from flash_doubles import (
    DIM,
    HEADS,
    LONGEST,
    QUERIES,
    SIZE,
    Backend,
    Builder,
    Common,
    FullAttentionSpec,
    Impl,
    Requests,
    SinkFullAttentionSpec,
    Spec,
    pool,
    split,
)  # fmt: skip
from hashcore import torch_ops
from hashcore.cuda.source import HASHCORE_KERNELS, read_source
from hashtrain import Hasher, HasherConfig, ModelShape
from hostsim import Simulator, compiler
from serve_engine import built, impls
from sparse_decode.cuda import gather
from sparse_decode.cuda import pages as paged_cuda
from sparse_decode.pages import Step
from sparse_decode.select import HashSelector
from sparse_serve.device_batch import device_pages, rounded
from sparse_serve.served import Served
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

MODEL = LlamaConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
CLOSE = {"rtol": 1e-2, "atol": 2e-2}  # bfloat16
REGISTRY, FLASH = "vllm.v1.attention.backends.registry", "vllm.v1.attention.backends.flash_attn"
MODULES = ["vllm", "vllm.config", "vllm.model_executor", "vllm.model_executor.models", "vllm.v1", "vllm.v1.attention"]
MODULES += ["vllm.model_executor.models.utils", "vllm.v1.attention.backend", "vllm.v1.attention.backends", FLASH]
MODULES += ["vllm.v1.attention.backends.utils", "vllm.v1.kv_cache_interface"]
SOURCES = {
    "score.cu": ("list_candidates", "list_candidates_shared"),
    "choose.cu": ("select_32", "select_64"),
    "gather.cu": ("gather", "combine"),
    "place.cu": ("place_codes",),
}


@pytest.fixture
def backend(monkeypatch):
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    of = sys.modules
    of["vllm.config"].get_current_vllm_config = lambda: of["vllm.config"].current
    of["vllm.model_executor.models.utils"].extract_layer_index = int
    of["vllm.v1.attention.backend"].AttentionCGSupport = SimpleNamespace(UNIFORM_SINGLE_TOKEN_DECODE="uniform")
    of[FLASH].FlashAttentionBackend, of[FLASH].FlashAttentionImpl = Backend, Impl
    of[FLASH].FlashAttentionMetadataBuilder = Builder
    of["vllm.v1.attention.backends.utils"].split_decodes_and_prefills = split
    of["vllm.v1.kv_cache_interface"].FullAttentionSpec = FullAttentionSpec
    monkeypatch.delitem(sys.modules, "sparse_serve._gpu_backend", raising=False)
    yield importlib.import_module("sparse_serve._gpu_backend")
    sys.modules.pop("sparse_serve._gpu_backend", None)


@pytest.fixture
def asked(tmp_path):
    Hasher(HasherConfig("transform", ModelShape.of(MODEL), bits=128), 0).save_pretrained(tmp_path)
    return {"hasher": str(tmp_path), "sink": 1, "recent": 4, "dense_layers": [0]}


@functools.cache
def simulator(source, macros):
    folder = HASHCORE_KERNELS if (HASHCORE_KERNELS / source).is_file() else gather.KERNELS
    return Simulator(read_source(folder, source), list(SOURCES[source]), dict(macros))


@pytest.fixture
def simulated(monkeypatch):
    """Send what would be launched to the simulator; lists the kernels."""
    if compiler() is None:
        pytest.skip("g++ is needed to run the kernels on the CPU")
    kernels = []

    def run(launches, device, folder=None):
        for one in launches:
            kernels.append(one.kernel)
            simulator(one.source, one.macros).launch(one.kernel, one.grid, (one.threads,), one.arguments)

    monkeypatch.setattr("hashcore.cuda.launch.run", run)
    search = torch_ops.on_cuda("search")
    monkeypatch.setattr(paged_cuda, "SEARCH", types.SimpleNamespace(search=search))
    ours = types.SimpleNamespace(gather=gather.gather, place_codes=paged_cuda.place_codes)
    monkeypatch.setattr(paged_cuda, "OPERATORS", ours)
    return kernels


TWO = ((FullAttentionSpec(), {}),) * 2


def engine(backend, settings, layers=TWO):
    return serve_engine.engine(backend, {"spotlight": settings} if settings else {}, layers)


def attend(impl, builder, cache, common, inputs):
    q, k, v = inputs
    metadata, out = builder.build(0, common), torch.full_like(q, torch.nan)
    impl.do_kv_cache_update(None, k, v, cache, common.slot_mapping)
    return metadata, impl.forward(None, q, k, v, cache, metadata, out)


STEPS = [{"a": 70, "b": 25}, {"a": 1, "b": 1, "c": 40}, {"b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}]


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.1])
def test_steps_are_those_of_vllm_and_of_the_cpu(backend, asked, simulated, fraction, tokens_first):
    """At 100 % as dense attention; below as `PagedLayer` on the CPU. Prompts are FlashAttention's."""
    config, specs = engine(backend, asked | {"fraction": fraction})
    builder, (_, impl), stock = built(backend, config, specs)[1], impls(config), Impl()
    cache, requests = pool(specs[1], tokens_first=tokens_first), Requests()
    for tokens in STEPS:
        common, inputs = requests.step(tokens)
        metadata, out = attend(impl, builder, cache, common, inputs)
        dense = stock.forward(None, *inputs, cache, common, torch.empty_like(out))
        rows = sum(count == 1 for count in tokens.values())
        assert metadata.spotlight.decodes == rows
        torch.testing.assert_close(out[rows:], dense[rows:], rtol=0, atol=0)
        expected = dense[:rows]
        if fraction < 1 and rows:
            pages, budget = device_pages(cache, 4), Served.of(config).budget
            step = Step.of(common.block_table_tensor[:rows], common.seq_lens[:rows], budget, len(cache), SIZE)
            expected = impl._paged.decode(inputs[0][:rows], pages, step)
        torch.testing.assert_close(out[:rows], expected, **CLOSE)
        assert out.isfinite().all()
    assert impl.forwarded == [95, 40]
    assert simulated.count("place_codes") == len(STEPS)
    assert simulated.count("gather") == len(STEPS) - 1
    assert simulated.count("list_candidates") == (3 if fraction == 1 else 2)  # rows of 26 and 41 tokens read the ends


def test_only_the_whole_step_has_a_schedule(backend, asked, simulated):
    config, specs = engine(backend, asked)
    builder, (_, impl), requests = built(backend, config, specs)[1], impls(config), Requests()
    for tokens in STEPS[:2]:
        attend(impl, builder, pool(specs[1]), *requests.step(tokens))
    assert builder.built == [False, True, False, True]
    assert builder.reorder_batch_threshold == 1


def test_layers_that_are_not_sparse_are_vllms(backend, asked):
    layers = [(FullAttentionSpec(), {})] * 2
    layers += [(FullAttentionSpec(), {"sliding_window": (31, 0)}), (SinkFullAttentionSpec(), {}), (Spec(), {})]
    layers += [(FullAttentionSpec(head_size_v=16), {}), (FullAttentionSpec(non_causal=True), {})]
    config, specs = engine(backend, asked, layers)
    builders = built(backend, config, specs)
    assert [impl._paged is not None for impl in impls(config)] == [False, True] + [False] * 5
    assert [builder._budget is not None for builder in builders] == [False, True] + [False] * 5
    assert [spec.page_size_padded is not None for spec in specs] == [True] * 3 + [False] * 4
    (_, spec), others = specs[:2], specs[1].unpadded_page_size_bytes
    assert spec.page_size_padded >= others + 16 * SIZE * HEADS
    assert not hasattr(builders[0].build(0, Requests().step({"a": 3})[0]), "spotlight")
    config, specs = engine(backend, {})
    assert specs == [FullAttentionSpec()] * 2
    assert [builder._budget for builder in built(backend, config, specs)] == [None, None]


def test_a_graph_has_room_for_the_longest_context(backend, asked):
    config, specs = engine(backend, asked | {"fraction": 0.5})
    builder = built(backend, config, specs)[1]
    common, _ = Requests().step({"a": 1, "b": 1})
    assert builder.build(0, common).spotlight.step().width == 3  # half of a page, besides the ends
    assert builder.build_for_cudagraph_capture(common).spotlight.step().width == LONGEST // 2 - 5
    assert (builder._cudagraph_support, builder.supports_update_block_table) == ("uniform", False)


def test_a_capture_makes_its_own_step(backend, asked, monkeypatch):
    """A graph must contain what is computed from lengths and tables: one made before would keep old numbers."""
    config, specs = engine(backend, asked)
    batch = built(backend, config, specs)[1].build(0, Requests().step({"a": 1})[0]).spotlight
    eager = batch.step()
    assert batch.step() is eager
    monkeypatch.setattr("hashcore.cuda.launch.lane", lambda device: ("a stream", "a capture"))
    assert batch.step() is not eager
    assert batch.step() is batch.step()


def test_the_views_of_a_cache_are_made_once(backend, asked, simulated):
    config, specs = engine(backend, asked)
    impl, cache = impls(config)[1], pool(specs[1])
    built(backend, config, specs)
    assert impl._pages(cache) is impl._pages(cache)
    assert impl._pages(pool(specs[1])) is not impl._pages(cache)


REFUSED = {
    "ALiBi": (FullAttentionSpec(), {"alibi_slopes": [1.0]}, "attention biases"),
    "shared keys": (FullAttentionSpec(), {"shares": "0"}, "layers that share keys"),
    "pages of 48": (FullAttentionSpec(block_size=48), {}, "a power of two of tokens on a GPU, got 48"),
    "float32": (FullAttentionSpec(dtype=torch.float32), {}, "needs bfloat16 or float16, got torch.float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_sparse_layer_cannot_do_is_refused(name, backend, asked):
    spec, options, words = REFUSED[name]
    config, specs = engine(backend, asked, [(FullAttentionSpec(), {}), (spec, options)])
    with pytest.raises(ValueError, match=words):
        built(backend, config, specs)


def test_a_step_that_is_not_causal_is_refused(backend, asked):
    builder = built(backend, *engine(backend, asked))[1]
    with pytest.raises(ValueError, match="needs causal attention"):
        builder.build(0, replace(Requests().step({"a": 1})[0], causal=torch.ones(1)))


@pytest.mark.parametrize("tokens_first", [False, True])
def test_pages_hold_codes_behind_keys_and_values(tokens_first):
    spec = FullAttentionSpec(page_size_padded=2 * SIZE * HEADS * 2 * DIM + 16 * SIZE * HEADS + 64)
    cache = pool(spec, tokens_first=tokens_first)
    pages = device_pages(cache, 4)
    cache[3, 1, 5] = torch.arange(2 * DIM)
    pages.codes[:] = -1
    assert pages.k[3, 1, 5].tolist() == list(range(DIM))
    assert pages.v[3, 1, 5].tolist() == list(range(DIM, 2 * DIM))
    assert cache[3, 0].isnan().all()
    assert (pages.codes == -1).all()
    small = FullAttentionSpec(page_size_padded=2 * SIZE * HEADS * 2 * DIM + 16 * SIZE * HEADS - 16)
    with pytest.raises(ValueError, match="must have room for codes after its keys and values"):
        device_pages(pool(small), 4)


def test_sizes_are_rounded_to_few():
    sizes = {rounded(n, 16, 131_072) for n in range(1, 131_072)}
    assert len(sizes) < 100
    assert all(n <= rounded(n, 16, 131_072) <= max(n + 15, n * 9 / 8) for n in range(1, 131_072, 7))
    assert rounded(1000, 16, 1008) == 1008


class Launching(TorchDispatchMode):
    """Lists operators that launch something; raises where the host would wait."""

    NOTHING = (
        "empty",
        "detach",
        "alias",
        "_unsafe_view",
        "new_empty",
        "empty_like",
        "lift_fresh",
        "device",
        "promote_types",
    )

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, aliases = func._schema.name.split("::")[-1], func._schema.returns
        is_view = bool(aliases) and aliases[0].alias_info is not None and not aliases[0].alias_info.is_write
        assert name not in ("_local_scalar_dense", "nonzero", "item"), "the host would wait"
        if name not in self.NOTHING and not is_view:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_a_step_on_a_gpu_waits_for_nothing_and_its_launches_are_counted(backend, asked, monkeypatch):
    """Fake tensors on CUDA: the second sparse layer of a step of four rows."""
    config, specs = engine(backend, asked | {"fraction": 0.5}, ((FullAttentionSpec(), {}),) * 3)
    built(backend, config, specs)
    builder, (_, first, second) = built(backend, config, specs)[1], impls(config)
    monkeypatch.setattr("hashcore.cuda.launch.lane", lambda device: ("a stream",))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():
        hasher = Served.of(config).hasher
        fakes = {id(x): mode.from_tensor(x) for x in (*hasher.buffers(), *hasher.parameters())}
        first._paged.selector = second._paged.selector = HashSelector(copy.deepcopy(hasher, fakes))
        caches = [pool(spec, device="cuda") for spec in specs]
        made = functools.partial(torch.zeros, device="cuda")
        starts, slots = made(5, dtype=torch.int32), made(4, dtype=torch.int64)
        tables = made(4, LONGEST // SIZE, dtype=torch.int32)
        common = Common(starts, starts, made(4, dtype=torch.int32), 4, 4, 1, 200, tables, slots)
        q, k, v = (made(4, n, DIM, dtype=torch.bfloat16) for n in (QUERIES, HEADS, HEADS))
        monkeypatch.setattr(
            sys.modules["sparse_serve._gpu_backend"], "split_decodes_and_prefills", lambda *_, **__: (4, 0, 4, 0)
        )
        metadata, out = builder.build(0, common), torch.empty_like(q)
        seen = []
        for _ in range(2):  # the first round moves the hasher's weights
            for impl, cache in ((first, caches[1]), (second, caches[2])):
                with Launching() as launching:
                    impl.do_kv_cache_update(None, k, v, cache, slots)
                    impl.forward(None, q, k, v, cache, metadata, out)
                seen.append([name for name in launching.names if name not in ("clone", "contiguous")])
        assert seen[3] == ["hash_keys", "place_codes", "hash_queries", "search", "gather", "copy_"]
        assert second.forwarded == []
