"""A decode step on a GPU that is not there: nothing waits for it, nothing is copied, and operators are counted."""

import sys
from unittest import mock

import pytest
import torch
from fake_gpu import (
    FAMILIES,
    KINDS,
    PROMPT,
    ROOM,
    ROWS,
    TENTH,
    Operators,
    answered,
    beyond_dense,
    cache_of,
    config_of,
    fake_gpu,
    mask_of,
    model_of,
    steps,
    told,
)
from hashcore.cuda.program import require_compiler
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import attach, budget, step
from sparse_decode.budget import LayerBudget
from sparse_decode.hashers import QueryHeadHasher
from sparse_decode.select import HashSelector, RecentSelector
from sparse_decode_doubles import slow_but
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from transformers import StaticCache

SHAPE = ModelShape.of(config_of("llama"))
BY_HEAD = LayerBudget(0.1, by_head=(0.5, 1.5))
MOST = {"plain": (12, 5), "padded": (12, 5), "static": (12, 6), "host": (12, 6), "beam": (12, 5)}
"""Operators and launches a layer of each kind of step, with the remainder, beyond those of a dense one."""
QUICK = "llama", "gpt_oss"


def selector_of(variant="transform", family="llama", per_query_head=False):
    hasher = Hasher(HasherConfig(variant, ModelShape.of(config_of(family))), 0)
    return HashSelector(QueryHeadHasher(hasher) if per_query_head else hasher)


def check(kind, *given, more=0, **how):
    found = beyond_dense(*given, kind=kind, **how)
    operators, launches = MOST[kind]
    assert found.operators <= operators + more
    assert found.launches <= launches + more
    # The new key and value go to host memory; the host does not wait for them.
    assert found.copies == (2 if kind == "host" else 0)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_a_step_does_not_wait(family, kind, captured, monkeypatch):
    """In a capture, too: there, each graph finds for itself what rows see, once for all of its layers."""
    if captured:
        for module in (step, budget):
            monkeypatch.setattr(module, "in_graph", lambda device: True)
        monkeypatch.setattr(step, "lane", lambda device: (0, 0, 1))
    check(kind, family, "transform")


@pytest.mark.sample(2)
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("variant", ["linear", "lsh", "paper", "planes"])
def test_every_hasher_of_ours_is_hashed_in_one_launch(variant, per_query_head):
    for kind in ("plain", "padded", "static"):
        check(kind, "llama", variant, per_query_head=per_query_head)


@pytest.mark.sample(4)
@pytest.mark.parametrize("own", [LayerBudget(0.1, sink=0, recent=0), LayerBudget(0.1, sink=4, recent=16), BY_HEAD])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_always_read_and_by_head(own, kind):
    check(kind, "llama", "transform", own, more=1 if own is BY_HEAD else 0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", ["planes", "transform"])
@pytest.mark.parametrize("kind", ["plain", "padded", "static", "beam"])
def test_a_step_does_nothing_in_host_memory(variant, kind):
    """A step whose operators are all on the device, wait for nothing and copy nothing is what a CUDA graph captures."""
    selector = selector_of(variant)
    with fake_gpu():
        found = steps(config_of("llama"), selector, TENTH, kind)
    assert "gather" in found.launching
    assert found.on_host == found.copies == []


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_an_attached_prompt_waits_only_to_look_at_padding(family, kind, monkeypatch):
    """Once in a pass for each mask that the model makes, one or two; the steps after it wait for nothing."""
    config, selector, looks = config_of(family), selector_of(family=family), []

    def equal(*_):
        looks.append(sys._getframe(1).f_code.co_name)
        return True

    with fake_gpu():
        model, cache, mask = model_of(config), cache_of(config, kind), mask_of(kind)

        def call(tokens, end):
            ids = torch.zeros(ROWS, tokens, dtype=torch.long, device="cuda")
            model(ids, attention_mask=None if mask is None else mask[:, :end], past_key_values=cache)

        how = {"kv": "host"} if kind == "host" else {}
        with torch.inference_mode(), attach(model, selector, TENTH, **how):
            with told(PROMPT), answered() as asking, monkeypatch.context() as patched:
                patched.setattr(torch, "equal", equal)
                call(PROMPT, PROMPT)
            with told(PROMPT + 1):
                call(1, PROMPT + 1)
            call(1, PROMPT + 2)
    assert asking == looks
    assert looks in ([["_mask"], ["_mask"] * 2] if mask is not None else [[]])


@pytest.mark.sample(3)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("variant", ["lsh", "paper", "planes", "transform"])
def test_a_selector_made_elsewhere_is_placed_when_it_is_used(variant, inference):
    """Its weights are real and in host memory, as those of a hasher that was loaded."""
    with torch.inference_mode(inference):
        selector = selector_of(variant)
    with fake_gpu():
        found = steps(config_of("llama"), selector, TENTH, "plain", whole=False)
    assert "gather" in found.launching
    assert found.on_host == found.copies == []


def test_beams_over_host_memory_wait_for_what_was_written(monkeypatch):
    """Rows change places in host memory: once the device has written them, and by an index that is copied there."""
    config, waited, pinned = config_of("llama"), [], []

    class Stream:
        def synchronize(self):
            waited.append(sys._getframe(2).f_code.co_name)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(FakeTensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(FakeTensor, "pin_memory", lambda x: pinned.append(x.device.type) or x)
    selector, twice = selector_of(), 2 * config.num_hidden_layers
    with fake_gpu(), torch.inference_mode():
        model, cache = model_of(config), cache_of(config, "host")
        beams = torch.zeros(ROWS, dtype=torch.long, device="cuda")
        ids = torch.zeros(ROWS, PROMPT, dtype=torch.long, device="cuda")
        model(ids, past_key_values=cache)
        with attach(model, selector, TENTH, kv="host"), told(PROMPT + 1):
            for _ in range(2):
                model(ids[:, :1], past_key_values=cache)
            assert waited == []
            with Operators() as seen:
                cache.reorder_cache(beams)
            assert waited == ["map_batch"] * twice, "keys and values of each layer"
            assert seen.copies == ["to"] * twice, "the index, for keys and for values"
            assert pinned == ["cpu"] * twice
            model(ids[:, :1], past_key_values=cache)
    assert len(waited) == twice


@pytest.mark.parametrize("selector", [RecentSelector(), HashSelector(Hasher(HasherConfig("lsh", SHAPE), 0))])
def test_a_missing_compiler_is_said_when_a_model_of_a_gpu_is_attached(selector, monkeypatch):
    with fake_gpu():
        model = model_of(config_of("llama"))
        monkeypatch.setattr("sparse_decode.model.require_compiler", require_compiler)
        monkeypatch.setitem(sys.modules, "cuda.core", None)
        with pytest.raises(ValueError, match="needs cuda-core to compile its CUDA kernels, and it is not installed"):
            attach(model, selector, TENTH)


WAITS = {DataDependentOutputException: lambda x: bool(x.any()), DynamicOutputShapeException: lambda x: len(x.nonzero())}


@pytest.mark.parametrize("error", WAITS)
def test_the_harness_sees_host_memory_and_waits(error):
    with fake_gpu(), Operators() as seen:
        torch.ones(3).add_(1)
    assert "add_" in seen.on_host
    see = step.seen_on_device

    def looking(interval, *how):
        return see(interval * WAITS[error](interval), *how)

    with mock.patch("sparse_decode.step.seen_on_device", looking), pytest.raises(error):
        beyond_dense("llama", "planes", kind="padded")


OF_LLAMA = "planes", "lsh", "paper", "paper-heads"
COMPILED = *(("llama", variant, False) for variant in OF_LLAMA), *((family, "transform", True) for family in FAMILIES)
OURS = {"hashcore.search", "sparse_decode.gather", "sparse_decode.hash_keys", "sparse_decode.hash_queries"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "variant", "remainder"), slow_but((COMPILED[0], COMPILED[4], COMPILED[-1]), COMPILED)
)
def test_a_compiled_step_of_a_gpu_is_one_graph_on_it(family, variant, remainder):
    """torch.compile takes it whole, waits for nothing, and finds operators alone, none of them in host memory."""
    config, nodes, per_query_head = config_of(family), [], variant.endswith("-heads")
    selector = selector_of(variant.removesuffix("-heads"), family, per_query_head)

    def backend(graph, given):
        nodes.append([node for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def operands(end):
        ids = torch.zeros(ROWS, 1, dtype=torch.long, device="cuda")
        return ids, torch.ones(ROWS, end, dtype=torch.long, device="cuda")

    torch._dynamo.reset()
    with fake_gpu(), torch.no_grad():
        model, cache = model_of(config), StaticCache(config=config, max_cache_len=ROOM)
        prompt = torch.zeros(ROWS, PROMPT, dtype=torch.long, device="cuda")
        model(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache)
        with attach(model, selector, TENTH, remainder=remainder):
            with told(PROMPT + 1):
                ids, mask = operands(PROMPT + 1)
                model(ids, attention_mask=mask, past_key_values=cache)
            ids, mask = operands(ROOM)
            torch.compile(model, fullgraph=True, backend=backend)(ids, attention_mask=mask, past_key_values=cache)
    torch._dynamo.reset()
    assert len(nodes) == 1
    values = [node.meta["example_value"] for node in nodes[0] if "example_value" in node.meta]
    assert {x.device.type for x in values if isinstance(x, torch.Tensor)} == {"cuda"}
    ours = {str(node.target) for node in nodes[0] if str(node.target).startswith(("hashcore.", "sparse_decode."))}
    assert ours == OURS | ({"sparse_decode.add_token"} if remainder else set())
