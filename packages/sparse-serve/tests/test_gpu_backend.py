"""The GPU backend on stand-ins for vLLM: results under the host simulator, launches and waits by fake CUDA tensors."""

import copy
import functools
import importlib
import sys
import types
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hashcore import torch_library
from hashcore.cuda.source import HASHCORE_KERNELS, read_source
from hashcore.hostsim import Simulator, compiler
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import gather, paged_cuda, place_cuda
from sparse_decode.paged import Step
from sparse_decode.select import HashSelector
from sparse_serve.device_batch import device_pages, rounded
from sparse_serve.served import Served
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

MODEL = LlamaConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
SIZE, HEADS, QUERIES, DIM, LONGEST = 16, 2, 4, 32, 256
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


@dataclass(frozen=True)
class Spec:
    """A cache spec of vLLM, as far as it is used."""

    block_size: int = SIZE
    num_kv_heads: int = HEADS
    head_size: int = DIM
    head_size_v: int = DIM
    dtype: torch.dtype = torch.bfloat16
    page_size_padded: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    @property
    def unpadded_page_size_bytes(self):
        return 2 * self.block_size * self.num_kv_heads * (self.head_size + self.head_size_v)


class FullAttentionSpec(Spec):
    """Ordinary full attention."""


class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention that is something else, too."""


@dataclass
class Common:
    """What vLLM says of a step."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    is_prefilling: Any = None
    seq_lens_cpu_upper_bound: Any = None


class Impl:
    """FlashAttention: dense attention of each token, by its row's table."""

    def __init__(self, sliding_window=(-1, -1), alibi_slopes=None, shares=None):
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = QUERIES, HEADS, DIM, DIM**-0.5
        self.num_queries_per_kv, self.logits_soft_cap, self.sinks = QUERIES // HEADS, 0, None
        self.sliding_window, self.alibi_slopes, self.kv_sharing_target_layer_name = sliding_window, alibi_slopes, shares
        self.forwarded = []

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        for at, slot in enumerate([] if kv_cache.is_cuda else slot_mapping.tolist()):
            if slot >= 0:
                kv_cache[slot // SIZE, :, slot % SIZE] = torch.cat([key[at], value[at]], -1)

    def forward(self, layer, query, key, value, kv_cache, metadata, output, output_scale=None, output_block_scale=None):
        self.forwarded.append(metadata.num_actual_tokens)
        starts = metadata.query_start_loc.tolist()
        for row, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
            length = int(metadata.seq_lens[row])
            for at in range(first, end):
                seen = torch.arange(length - (end - 1 - at))
                pages = metadata.block_table_tensor[row].long()[seen // SIZE]
                k, v = kv_cache[pages, :, seen % SIZE].float().transpose(0, 1).chunk(2, -1)
                q = query[at].float().view(HEADS, -1, DIM)
                output[at] = (((q @ k.mT) * self.scale).softmax(-1) @ v).view(QUERIES, DIM).to(output.dtype)
        return output


class Builder:
    """FlashAttention's builder of metadata, which is the step itself here."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.block_size, self.model_config, self.built = kv_cache_spec.block_size, vllm_config.model_config, []

    def _init_reorder_batch_threshold(self, threshold):
        self.reorder_batch_threshold = threshold

    def build(self, common_prefix_len, common, fast_build=False):
        self.built.append(fast_build)
        return replace(common)

    def build_for_cudagraph_capture(self, common):
        return self.build(0, common)


class Backend:
    """FlashAttention's backend."""


def split(common, decode_threshold):
    lengths = common.query_start_loc_cpu.diff()
    rows = int((lengths > decode_threshold).int().argmax()) if common.max_query_len > 1 else common.num_reqs
    return rows, common.num_reqs - rows, int(common.query_start_loc_cpu[rows]), -1


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
    search = torch_library._functional(torch_library.RESULTS["search"], torch_library.Cuda.search)
    monkeypatch.setattr(paged_cuda, "SEARCH", types.SimpleNamespace(search=search))
    monkeypatch.setattr(paged_cuda, "OPERATORS", types.SimpleNamespace(gather_paged=gather._paged))
    monkeypatch.setattr(place_cuda, "OPERATORS", types.SimpleNamespace(place_codes=place_cuda.place_codes))
    return kernels


def engine(backend, settings, layers=((FullAttentionSpec(), {}),) * 2):
    """Create the layers of an engine as vLLM does; return its config and the specs of their pages."""
    config = SimpleNamespace(
        additional_config={"spotlight": settings} if settings else {},
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context={}),
        model_config=SimpleNamespace(max_model_len=LONGEST),
    )
    sys.modules["vllm.config"].current, specs = config, []
    for index, (spec, options) in enumerate(layers):
        config.compilation_config.static_forward_context[str(index)] = SimpleNamespace(
            impl=backend.SpotlightImpl(**options)
        )
        specs.append(backend.SpotlightBackend.customize_spec(spec))
    return config, specs


def built(backend, config, specs):
    return [
        backend.SpotlightBuilder(spec, [name], config, torch.device("cpu"))
        for spec, name in zip(specs, config.compilation_config.static_forward_context, strict=True)
    ]


def impls(config):
    return [layer.impl for layer in config.compilation_config.static_forward_context.values()]


def pool(spec, pages=40, tokens_first=False, device=None):
    """A layer's cache [M, H, S, 2 D] in pages of a spec, NaN everywhere."""
    item, page = 2, spec.page_size_padded or spec.unpadded_page_size_bytes
    memory = torch.full((pages, page // item), torch.nan, dtype=torch.bfloat16, device=device)
    inside = memory[:, : spec.unpadded_page_size_bytes // item]
    if tokens_first:  # vLLM's LBNHC
        return inside.view(pages, SIZE, HEADS, 2 * DIM).transpose(1, 2)
    return inside.view(pages, HEADS, SIZE, 2 * DIM)


class Requests:
    """Requests of a length each, in shuffled pages."""

    def __init__(self, seed=0):
        self.draw = torch.Generator().manual_seed(seed)
        self.free = torch.randperm(39, generator=self.draw).add(1).tolist()
        self.lengths, self.tables = {}, {}

    def step(self, tokens):
        """Compute some tokens of each request: the step's metadata, queries, keys and values."""
        for name, count in tokens.items():
            self.lengths[name] = self.lengths.get(name, 0) + count
            table = self.tables.setdefault(name, [])
            table += [self.free.pop() for _ in range(-(-self.lengths[name] // SIZE) - len(table))]
        counts = torch.tensor(list(tokens.values()))
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
        lengths = torch.tensor([self.lengths[name] for name in tokens], dtype=torch.int32)
        blocks = torch.full((len(tokens), LONGEST // SIZE), -7, dtype=torch.int32)
        slots = []
        for row, (name, count) in enumerate(tokens.items()):
            blocks[row, : len(self.tables[name])] = torch.tensor(self.tables[name])
            at = range(self.lengths[name] - count, self.lengths[name])
            slots += [self.tables[name][i // SIZE] * SIZE + i % SIZE for i in at]
        total, most = int(counts.sum()), int(counts.max())
        common = Common(starts, starts, lengths, len(tokens), total, most, int(lengths.max()), blocks, torch.tensor(slots))
        shapes = (QUERIES, HEADS, HEADS)
        return common, [torch.randn(total, n, DIM, generator=self.draw).bfloat16() for n in shapes]


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

    NOTHING = ("empty", "detach", "alias", "_unsafe_view", "new_empty", "empty_like", "lift_fresh", "device", "promote_types")

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
    config, specs = engine(backend, asked, ((FullAttentionSpec(), {}),) * 3)
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
        monkeypatch.setattr(sys.modules["sparse_serve._gpu_backend"], "split_decodes_and_prefills", lambda *_, **__: (4, 0, 4, 0))
        metadata, out = builder.build(0, common), torch.empty_like(q)
        seen = []
        for _ in range(2):  # the first round moves the hasher's weights
            for impl, cache in ((first, caches[1]), (second, caches[2])):
                with Launching() as launching:
                    impl.do_kv_cache_update(None, k, v, cache, slots)
                    impl.forward(None, q, k, v, cache, metadata, out)
                seen.append([name for name in launching.names if name not in ("clone", "contiguous")])
        assert seen[3] == ["hash_keys", "place_codes", "hash_queries", "search", "gather_paged", "copy_"]
        assert second.forwarded == []
