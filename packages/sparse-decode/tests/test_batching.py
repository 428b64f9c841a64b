"""transformers' continuous batching while attached: every request is answered as it would be alone."""

import contextlib
import gc
import math
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Budget, OracleSelector, QueryHeadHasher, attach
from sparse_decode.generation.packed import MARK, CodedBlocks
from sparse_decode.model import NAMES, PAGED_NAMES
from sparse_decode_doubles import UNUSUAL, VOCABULARY, Calibrated, SignHasher, generate, slow_but, tiny_model
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api, offloading_manager
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestState

allocators = pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators",
    reason="older versions of transformers have other blocks, which are refused",
)

BATCHING = {"page_size": 16, "num_blocks": 60, "max_batch_tokens": 48}
FEW = 13  # blocks, of which the requests below need 39
QUICK = ("llama", "qwen3", "gpt_oss")
QUARTER, FEWEST = Budget(0.25), Budget(0.02, min_tokens=3, sink=0, recent=0)
DENSE_LAYERS = {"gpt_oss": 0}  # of its four layers two slide


def draw(*lengths):
    """Draw requests of these lengths, and two more that begin alike."""
    generator = torch.Generator().manual_seed(3)
    shared, *found = (torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (96, *lengths, 3, 2))
    return [*found[:-2], *(shared + tail for tail in found[-2:])]


REQUESTS = draw(1, 17, 130, 33, 49)  # in batches of 48 tokens, the last one of 49 is alone


def settings(new=12, copies=1):
    found = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1)
    found.num_return_sequences = copies  # its constructor refuses copies of a greedy text
    return found


def batching(**changes):
    return ContinuousBatchingConfig(**{**BATCHING, **changes})


def batch(model, requests=REQUESTS, new=12, copies=1, kept=False, **config):
    """Answer requests together, in their order."""
    how = {"generation_config": settings(new, copies), "persistent_manager": kept}
    how["continuous_batching_config"] = batching(**config)
    found = model.generate_batch(requests, **how).values()
    assert len(found) == copies * len(requests)
    assert [x.error for x in found if x.error] == []
    return [x.generated_tokens for x in found]


def alone(model, requests=REQUESTS, new=12):
    """Answer requests one at a time."""
    return [generate(model, torch.tensor([x]), new_tokens=new)[0, len(x) :].tolist() for x in requests]


def sparse(model, budget=QUARTER, family="llama", **options):
    hasher = Hasher(HasherConfig("lsh", ModelShape.of(model.config)))
    return attach(model, hasher, budget, **{"dense_layers": DENSE_LAYERS.get(family, 1), **options})


@pytest.fixture
def calls(monkeypatch):
    """The results of calls of transformers' methods, by name, from `calls.of(owner, name)` on."""
    found = SimpleNamespace(results={})

    def of(owner, name):
        method, results = getattr(owner, name), found.results.setdefault(name, [])

        def counted(*given, **named):
            results.append(method(*given, **named))
            return results[-1]

        monkeypatch.setattr(owner, name, counted)

    found.of = of
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", slow_but(("llama", "gpt_oss"), QUICK))
def test_a_full_budget_gives_the_tokens_of_the_batch_without_us(family):
    model = tiny_model(family)
    before = batch(model)
    with sparse(model, Budget(1.0), family) as attachment:
        assert batch(model) == before
        assert attachment.density() == dict.fromkeys(attachment.layers, 1.0)
    assert batch(model) == before


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "budget"),
    slow_but([(x, FEWEST) for x in QUICK], [*((x, FEWEST) for x in UNUSUAL), *((x, QUARTER) for x in QUICK)]),
    ids=str,
)
def test_requests_together_are_answered_as_alone(family, budget):
    """Ragged prompts, whole and in chunks, a shared prefix, a last token of a prompt alone in its chunk."""
    model = tiny_model(family)
    with sparse(model, budget, family) as attachment:
        expected, counts = alone(model), attachment.counts()
        for tokens in (48, 2048):
            attachment.reset_density()
            assert batch(model, max_batch_tokens=tokens) == expected
            assert attachment.counts() == counts
    assert alone(model) != expected, "too easy a case to tell"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (Budget(0.1, min_tokens=4, values=0.5), {}),
        (Budget(0.3, by_head=(0.5, 1.5)), {}),
        (Budget(0.1, dense_below=40), {}),
        (QUARTER, {"layer_budgets": {2: FEWEST}}),
        (QUARTER, {"sparse_rows": 20}),
        (QUARTER, {"dense_layers": {2}}),
    ],
)
def test_other_budgets_and_rows(budget, options):
    model = tiny_model()
    with sparse(model, budget, **options) as attachment:
        expected, counts = alone(model), attachment.counts()
        attachment.reset_density()
        assert batch(model, allow_block_sharing=False) == expected  # rows of a shared prefix would count once
        assert attachment.counts() == counts


@pytest.mark.slow
def test_a_manager_that_is_kept_answers_from_a_warm_cache(calls):
    model = tiny_model()
    with sparse(model) as attachment:
        expected = alone(model)
        calls.of(PagedAttentionCache, "search_prefix_match")
        assert batch(model, kept=True) == expected
        calls.results["search_prefix_match"].clear()
        assert batch(model, kept=True) == expected
        assert sorted(calls.results["search_prefix_match"]) == [0, 16, 32, 48, 96, 96, 128]
        assert model._cached_continuous_batching_manager.batching is attachment._batching
    assert not hasattr(model, "_cached_continuous_batching_manager")


@pytest.mark.parametrize("family", slow_but(("llama",), ("llama", "gpt_oss")))
def test_requests_whose_blocks_are_taken_go_on_as_before(family, calls):
    """Their tokens are read again with the prompt, and yet sparse where they were sparse before."""
    model = tiny_model(family)
    calls.of(RequestState, "create_equivalent_initial_request")
    with sparse(model, FEWEST, family):
        expected = alone(model, new=40)
        assert batch(model, new=40, num_blocks=FEW) == expected
    again = calls.results["create_equivalent_initial_request"]
    assert any(len(x.initial_tokens) > x._true_initial_tokens for x in again)


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(("gpt_oss",), ("llama", "gpt_oss")))
def test_offloaded_blocks_come_back_with_their_codes(family, calls, monkeypatch):
    model, empty = tiny_model(family), torch.empty
    plain = lambda *given, pin_memory=False, **named: empty(*given, **named)  # noqa: E731, only a GPU can pin memory
    monkeypatch.setattr(offloading_manager, "torch", _Other(torch, empty=plain))
    calls.of(offloading_manager.OffloadingManager, "_offload_to_cpu")
    with sparse(model, FEWEST, family):
        expected = alone(model, new=40)
        assert batch(model, new=40, num_blocks=FEW, cpu_offload_space=0.01) == expected
    assert any(calls.results["_offload_to_cpu"])


class _Other:
    """A module with other functions."""

    def __init__(self, module, **functions):
        self.__dict__.update(functions)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


@pytest.mark.parametrize("shared", [True, False])
def test_forks_get_the_codes_of_what_they_share_and_of_what_they_copy(shared, calls):
    model, requests = tiny_model(), REQUESTS[1:4]
    calls.of(PagedAttentionCache, "prepare_fork_request")
    with sparse(model, FEWEST):
        expected = [x for x in alone(model, requests) for _ in range(3)]
        assert batch(model, requests, copies=3, allow_block_sharing=shared) == expected
    assert [len(x) for x in calls.results["prepare_fork_request"]] == [2, 2, 2]


@pytest.mark.parametrize("family", slow_but(("gpt_oss",), ("llama", "gpt_oss")))
def test_nothing_is_read_from_blocks_that_no_request_owns(family, monkeypatch):
    """NaN, and codes of all ones, in whatever is free before each step; so also behind the last token of a block."""
    model, step = tiny_model(family), continuous_api.ContinuousBatchProcessor._generation_step
    poisoned = []

    def poison(processor, *given):
        cache, free = processor.cache, torch.ones_like(processor.cache.cache_tensor, dtype=torch.bool)
        free[: 2 * cache.bytes_per_sector] = False  # what padding reads and writes
        for allocator in cache.cache_allocators.values():
            owned = {*allocator.ledger.cached_blocks}.union(*allocator.block_table.values())
            free.view(-1, allocator.bytes_per_block)[sorted(owned)] = False
        cache.cache_tensor[free] = 255
        poisoned.append(int(free.sum()))
        return step(processor, *given)

    monkeypatch.setattr(continuous_api.ContinuousBatchProcessor, "_generation_step", poison)
    with sparse(model, QUARTER, family):
        expected = alone(model)
        assert batch(model) == expected
    assert min(poisoned) > 0


@contextlib.contextmanager
def opened(model, **config):
    """A manager whose cache exists, and which does not run."""
    given = settings(), batching(**config)
    manager = model.init_continuous_batching(*given)
    manager.warmup()
    yield manager
    manager.destroy()


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("page", [16, 24])
def test_keys_values_and_codes_share_no_memory(dtype, heads, page):
    model = tiny_model("qwen3", head_dim=heads).to(dtype)
    with sparse(model, dense_layers=1), opened(model, page_size=page) as manager:
        cache = manager.batch_processor.cache
        held, (allocator,) = getattr(cache, MARK), cache.cache_allocators.values()
        views = [x for pages in held.pages.values() for x in pages]
        assert len(views) == 9
        assert held.count * allocator.bytes_per_block == len(cache.cache_tensor)
        cache.cache_tensor.zero_()
        for view in views:
            view[:] = 1
        ones = sum(x.numel() * (1 if x.dtype == torch.int32 else len(_one(dtype).nonzero())) for x in views)
        assert int((cache.cache_tensor != 0).sum()) == ones
        codes = 3 * page * 2 * 16
        more = math.ceil(codes / allocator.bytes_per_page)
        assert len(allocator.layer_indices) == 4 + more
        assert cache.num_blocks == BATCHING["num_blocks"]


def _one(dtype):
    return torch.ones(1, dtype=dtype).view(torch.uint8)


SHAPE = ModelShape.of(tiny_model().config)
REFUSED = [
    ({"exact": 4}, {}, "exact mode; attach without exact"),
    ({"kv": "host"}, {}, 'kv="host"; attach with kv="device"'),
    ({"max_decode_rows": 4}, {}, "max_decode_rows=4; omit it"),
    ({"budget": Budget(shortlist=4)}, {}, "a shortlist; omit it"),
    ({"budget": Budget(of="length")}, {}, 'of="length"; omit it'),
    ({"selector": Calibrated()}, {}, "a remainder; attach with remainder=False"),
    ({"selector": OracleSelector()}, {}, "OracleSelector, not a hasher"),
    ({"selector": QueryHeadHasher(Hasher(HasherConfig("lsh", SHAPE)))}, {}, "not a hasher with codes per KV head"),
    ({}, {"default_compile_level": 1}, None),
    ({}, {"varlen_compile_config": transformers.CompileConfig()}, "a compile config; omit it"),
    ({}, {"use_async_batching": True}, "use_async_batching; omit it"),
]


@pytest.mark.parametrize(("options", "config", "reason"), REFUSED)
def test_what_does_not_work_is_refused_before_the_first_step(options, config, reason):
    model = tiny_model()
    given = {"selector": SignHasher(), "budget": QUARTER, "dense_layers": 1, **options}
    with attach(model, given.pop("selector"), given.pop("budget"), **given) as attachment:
        if reason is None:  # what flash attention never compiles
            assert batch(model, **config) == alone(model)
            return
        with pytest.raises(ValueError, match=reason) as error:
            batch(model, **config)
        assert str(error.value).count(". ") == 0
        assert model.config._attn_implementation == NAMES["sdpa"]
        assert not attachment.counts()


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_other_devices_are_refused(device, monkeypatch):
    model = tiny_model()
    with sparse(model):
        monkeypatch.setattr(type(model), "device", torch.device(device))
        with pytest.raises(ValueError, match=f"a model on {device}; move it to the CPU"):
            batch(model)


def test_a_cache_with_another_layout_is_refused(monkeypatch):
    model, update = tiny_model(), allocators.FullAttentionCacheAllocator.update

    def reversed_heads(self, k, v, *rest):
        return update(self, k.flip(1), v, *rest)

    monkeypatch.setattr(allocators.FullAttentionCacheAllocator, "update", reversed_heads)
    with sparse(model) as attachment:
        with pytest.raises(ValueError, match=r"stores keys in another way than expected \(keys that the") as error:
            batch(model)
        assert error.tb is not None  # which keeps the manager
        assert model.config._attn_implementation == NAMES["sdpa"]
        assert not attachment.counts()


@pytest.mark.parametrize(
    ("name", "other"),
    [("_create_batch_processor", None), ("switch_to_cb_friendly_attn", lambda self, model: None)],  # 5.17 has this
)
def test_another_kind_of_manager_is_refused(name, other, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(continuous_api.ContinuousBatchingManager, name, other)
    with sparse(model):
        with pytest.raises(ValueError, match=rf"works in another way than expected \({name}\)"):
            batch(model)
        assert model.config._attn_implementation == NAMES["sdpa"]


@pytest.mark.slow
def test_an_open_manager_has_the_attention_for_itself():
    model = tiny_model()
    with sparse(model, Budget(1.0)) as attachment:
        expected = alone(model)
        manager = model.init_continuous_batching(settings(), batching())
        assert model.config._attn_implementation == PAGED_NAMES["sdpa"]
        with pytest.raises(ValueError, match="a manager of continuous batching is open"):
            alone(model)
        with pytest.raises(ValueError, match="already attached"):
            sparse(model)
        manager.start()
        manager.stop()
        assert alone(model) == expected
        manager.start()
        attachment.detach()  # stops it
        assert not manager.is_running()
        assert "init_continuous_batching" not in vars(model)
        assert model.config._attn_implementation == "sdpa"
        with pytest.raises(ValueError, match="make another one after detach"):
            manager.warmup()
    assert alone(model) == expected


@pytest.mark.slow
def test_a_manager_from_before_is_refused():
    model = tiny_model()
    batch(model, kept=True)
    with sparse(model):
        with pytest.raises(ValueError, match="kept from before; call destroy_cached_continuous_batching_manager"):
            batch(model)
        model.destroy_cached_continuous_batching_manager()
        assert batch(model) == alone(model)
    manager = model.init_continuous_batching(settings(), batching())
    with sparse(model) as attachment:
        manager.start()
        manager.add_request(REQUESTS[1])
        assert "made before sparse attention was attached" in manager.get_result(timeout=10).error
        manager.stop()
        assert not attachment.counts()


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])  # gpt_oss lists the flash attentions that it may have
def test_flash_attn_installed_changes_nothing(family, monkeypatch):
    """transformers would set it by itself, and read its cache densely."""
    model = tiny_model(family)
    monkeypatch.setattr(continuous_api, "is_flash_attn_2_available", lambda **how: True)
    with sparse(model, QUARTER, family):
        assert batch(model, REQUESTS[:3]) == alone(model, REQUESTS[:3])


def test_detach_stops_managers_before_it_takes_hooks_away(monkeypatch):
    attachment = sparse(tiny_model())
    close, hooks = attachment._batching.close, []
    monkeypatch.setattr(attachment._batching, "close", lambda: (hooks.append(len(attachment._handles)), close()))
    attachment.detach()
    assert hooks[0] > 0
    assert not attachment._handles


OURS, STEPS = NAMES["sdpa"], PAGED_NAMES["sdpa"]


MADE = weakref.WeakSet()


def made(model, new=12, **config):
    MADE.add(manager := model.init_continuous_batching(settings(new), batching(**config)))
    return manager


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """A test that fails ends its threads, without which this process would not end."""
    yield
    for manager in list(MADE):
        if manager.is_running():
            manager.stop(hard_stop=True)


def ask(manager, requests=REQUESTS):
    return manager.add_requests(requests)


def answers(manager, names):
    """The answers to requests of a manager, in their order."""
    found = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=10)
        assert result is not None, "no answer"
        assert result.error is None, result.error
        found[result.request_id] = result.generated_tokens
    return [found[name] for name in names]


@pytest.mark.slow
def test_the_attention_stays_while_any_manager_is_open():
    model = tiny_model()
    with sparse(model):
        expected = alone(model)
        first, second = made(model), made(model)
        assert type(first) is type(second)
        assert first.batching is second.batching
        first.start()
        second.start()
        asked = ask(first), ask(second)
        assert answers(first, asked[0]) == answers(second, asked[1]) == expected
        first.stop()
        first.destroy()
        assert model.config._attn_implementation == STEPS
        assert answers(second, ask(second)) == expected
        second.stop()
        assert model.config._attn_implementation == OURS
        assert alone(model) == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", [{"block": False}, {"timeout": 0}], ids=str)
def test_the_attention_stays_until_the_thread_ends(how):
    """The manager is kept: otherwise transformers takes the cache away from a thread that still runs."""
    model = tiny_model()
    with sparse(model):
        expected = alone(model)
        manager = made(model)
        manager.warmup()
        manager.start()
        thread = manager._generation_thread
        with manager.pause():  # it cannot end meanwhile
            asked = ask(manager)
            stopping = threading.Thread(target=manager.stop, kwargs={"keep_for_next_session": True, **how})
            stopping.start()
            stopping.join()
            assert thread.is_alive()
            assert model.config._attn_implementation == STEPS
        assert answers(manager, asked) == expected
        thread.join()
        assert model.config._attn_implementation == OURS
        assert alone(model) == expected
        manager.stop()
        manager.start()
        assert model.config._attn_implementation == STEPS
        assert answers(manager, ask(manager)) == expected
        manager.stop()
        assert model.config._attn_implementation == OURS


def test_what_cannot_be_stopped_in_a_pause_goes_on():
    model = tiny_model()
    attachment = sparse(model)
    expected = alone(model)
    manager = made(model)
    manager.start()
    with manager.pause():
        for refused in (manager.stop, manager.destroy, attachment.detach):
            with pytest.raises(RuntimeError, match="Cannot stop the manager from inside a pause"):
                refused()
            assert model.config._attn_implementation == STEPS
        asked = ask(manager)
    assert answers(manager, asked) == expected
    attachment.detach()
    assert not manager.is_running()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.sample(1)
@pytest.mark.parametrize("end", ["destroy", "stop", "garbage", "detach"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_manager_that_was_never_started_lets_go_of_the_attention(end, warm):
    model = tiny_model()
    with sparse(model) as attachment:
        expected = alone(model)
        manager = made(model)
        if warm:
            manager.warmup()
        assert model.config._attn_implementation == STEPS
        if end == "garbage":
            del manager
        else:
            {"destroy": manager.destroy, "stop": manager.stop, "detach": attachment.detach}[end]()
        if end == "detach":
            assert model.config._attn_implementation == "sdpa"
        else:
            assert model.config._attn_implementation == OURS
            assert alone(model) == expected


def test_a_thread_that_does_not_start_lets_go_of_the_attention(monkeypatch):
    model = tiny_model()

    def full(thread):
        raise RuntimeError("can't start new thread")

    with sparse(model):
        manager = made(model)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", full)
            with pytest.raises(RuntimeError, match="new thread"):
                manager.start()
        manager.destroy()
        assert model.config._attn_implementation == OURS


def test_a_cache_that_cannot_be_made_lets_go_of_the_attention(monkeypatch):
    model = tiny_model()

    def full(**how):
        raise MemoryError("no room")

    with sparse(model):
        with monkeypatch.context() as patched:
            patched.setattr(continuous_api, "PagedAttentionCache", full)
            with pytest.raises(MemoryError, match="no room") as error:
                batch(model)
        assert error.tb is not None  # which keeps the manager
        assert model.config._attn_implementation == OURS
        assert batch(model, REQUESTS[:2]) == alone(model, REQUESTS[:2])


@pytest.fixture
def no_garbage_collector(monkeypatch):
    """Memory is freed only where nothing refers to it."""
    monkeypatch.setattr(continuous_api, "gc", SimpleNamespace(collect=lambda: 0))
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("started", [False, True])
def test_the_memory_of_a_cache_is_free_at_once(started, no_garbage_collector):
    model = tiny_model("gpt_oss")
    with sparse(model, QUARTER, "gpt_oss") as attachment:
        manager = made(model)
        manager.warmup()
        cache = manager.batch_processor.cache
        held = [
            weakref.ref(x) for x in (manager, manager.batch_processor, cache, cache.cache_tensor, getattr(cache, MARK))
        ]
        pages = [weakref.ref(x) for found in getattr(cache, MARK).pages.values() for x in found]
        if started:
            manager.start()
            answers(manager, ask(manager))
            assert sum(visible for _, visible in attachment.counts().values()) > 0
            manager.stop()
        del manager, cache
        assert [ref() for ref in held + pages if ref() is not None] == []


def test_a_step_leaves_nothing_behind(monkeypatch):
    """Its masks are as large as its keys, and a manager may wait for the next request for long."""
    model, masks = tiny_model(), []
    method = CodedBlocks.step

    def step(self, given):
        found = method(self, given)
        masks.append(weakref.ref(found))
        return found

    monkeypatch.setattr(CodedBlocks, "step", step)
    with sparse(model):
        manager = made(model)
        manager.start()
        answers(manager, ask(manager))
        with manager.pause():
            assert masks
            assert [ref for ref in masks if ref() is not None] == []
        manager.stop()


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", slow_but(("llama",), ("llama", "gpt_oss")))
@pytest.mark.parametrize("blocks", [BATCHING["num_blocks"], FEW])
def test_a_cancelled_request_frees_its_blocks_and_changes_no_other(family, blocks, monkeypatch):
    """One that decodes, one in the middle of its prompt, and one that waits."""
    model, step = tiny_model(family), continuous_api.ContinuousBatchProcessor._generation_step
    cancelled, freed = {}, []

    def cancel(processor, *given):
        tables = [x.block_table for x in processor.cache.cache_allocators.values()]
        freed.extend(name not in table for name in cancelled for table in tables)
        step(processor, *given)
        for name, state in processor.scheduler.active_requests.items():
            now = {"decoded": len(state.generated_tokens) == 4, "read": bool(state.remaining_prefill_tokens)}
            if now.get(name) and name not in cancelled:
                cancelled[name] = [len(table[name]) for table in tables]
                manager.cancel_request(name)

    monkeypatch.setattr(continuous_api.ContinuousBatchProcessor, "_generation_step", cancel)
    with sparse(model, FEWEST, family):
        expected = alone(model, new=40)
        manager = made(model, new=40, num_blocks=blocks)
        manager.add_request(REQUESTS[3] + REQUESTS[1], "decoded", 40)
        manager.add_request(REQUESTS[2][::-1], "read", 40)
        asked = ask(manager)
        manager.add_request(REQUESTS[0], "waits", 40)
        manager.cancel_request("waits")
        manager.start()
        assert answers(manager, asked) == expected
        assert manager.get_result(timeout=0.1) is None
        manager.stop()
    assert {*cancelled} == {"decoded", "read"}
    assert min(min(owned) for owned in cancelled.values()) > 0
    assert freed
    assert all(freed)
