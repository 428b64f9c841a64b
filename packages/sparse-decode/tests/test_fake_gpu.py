"""A decode step on a GPU that is not there: nothing waits for it, nothing is copied, and operators are counted."""

import json
import pathlib
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
    counted,
    fake_gpu,
    mask_of,
    model_of,
    steps,
    told,
)
from hashcore.cuda.program import require_compiler
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import attach, budget, positions
from sparse_decode.budget import LayerBudget
from sparse_decode.hashers import QueryHeadHasher
from sparse_decode.layer import plan as layer_plan
from sparse_decode.layer.blocks import AttentionArgs, RowRule
from sparse_decode.layer.plan import LayerPlan
from sparse_decode.positions import Sights
from sparse_decode.select import HashSelector, RecentSelector
from sparse_decode.unselected import moments
from sparse_decode.unselected.remainder import RunningMoments
from sparse_decode_doubles import slow_but
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from transformers import StaticCache

STORED = json.loads((pathlib.Path(__file__).parents[3] / "docs" / "results" / "gpu_step.json").read_text("utf-8"))
SHAPE = ModelShape.of(config_of("llama"))
OURS = {
    "hashcore.search",
    "sparse_decode.gather",
    "sparse_decode.hash_keys",
    "sparse_decode.hash_queries",
}
MOST = {"plain": (12, 5), "padded": (12, 5), "static": (12, 6), "host": (12, 6), "beam": (12, 5)}
"""Operators and launches a layer of each kind of step, with the remainder; 4 launches without it, see below."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", slow_but(("llama", "gpt_oss"), FAMILIES))
def test_a_step_does_not_wait(family, kind):
    found = beyond_dense(family, "transform", kind=kind)
    operators, launches = MOST[kind]
    assert found.operators <= operators
    assert found.launches <= launches
    # The new key and value go to host memory; the host does not wait for them.
    assert found.copies == (2 if kind == "host" else 0)


EAGER = ("gemma2", "gpt_oss")
"""Families with eager attention, whose masks hold numbers."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", slow_but(("llama", "gpt_oss"), FAMILIES))
def test_an_attached_prompt_waits_only_to_look_at_masks_of_numbers(family, kind):
    """Once in each layer, and once more for the sums of a static cache; the steps after it wait for nothing."""
    config = config_of(family)
    hasher = Hasher(HasherConfig("transform", ModelShape.of(config)), 0)
    with fake_gpu():
        model, cache, mask = model_of(config), cache_of(config, kind), mask_of(kind)
        selector = HashSelector(hasher)

        def call(tokens, end):
            ids = torch.zeros(ROWS, tokens, dtype=torch.long, device="cuda")
            seen = None if mask is None else mask[:, :end]
            model(ids, attention_mask=seen, past_key_values=cache)

        how = {"kv": "host"} if kind == "host" else {}
        with torch.inference_mode(), attach(model, selector, TENTH, **how):
            with told(PROMPT), answered() as asking:
                call(PROMPT, PROMPT)
            with told(PROMPT + 1):
                call(1, PROMPT + 1)
            call(1, PROMPT + 2)
    looks = config.num_hidden_layers * (2 if kind == "static" else 1) if family in EAGER else 0
    assert asking == ["visible_rows"] * looks


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", ["planes", "transform"])
@pytest.mark.parametrize("kind", ["plain", "padded", "static", "beam"])
def test_a_step_does_nothing_in_host_memory(variant, kind):
    """A step whose operators are all on the device, wait for nothing and copy nothing is what a CUDA graph captures."""
    config = config_of("llama")
    hasher = Hasher(HasherConfig(variant, ModelShape.of(config)), 0)
    with fake_gpu():
        found = steps(config, HashSelector(hasher), TENTH, kind)
    assert "gather" in found.launching
    assert found.on_host == found.copies == []


@pytest.mark.parametrize("kind", ["static", "padded"])
def test_a_captured_step_finds_what_rows_see_once(kind, monkeypatch):
    """Beyond what it launches outside of a capture, a layer adds to the counts of what it read."""
    outside = counted(f"transform+{kind}+remainder")
    for module in (layer_plan, budget):
        monkeypatch.setattr(module, "in_graph", lambda device: True)
    monkeypatch.setattr(layer_plan, "lane", lambda device: (0, 0, 1))
    assert counted(f"transform+{kind}+remainder").launches == outside.launches + 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("variant", ["lsh", "paper", "planes", "transform"])
def test_a_selector_made_elsewhere_is_placed_when_it_is_used(variant, inference):
    """Its weights are real and in host memory, as those of a hasher that was loaded."""
    config = config_of("llama")
    with torch.inference_mode(inference):
        selector = HashSelector(Hasher(HasherConfig(variant, ModelShape.of(config)), 0))
    with fake_gpu():
        found = steps(config, selector, TENTH, "plain", whole=False)
    assert "gather" in found.launching
    assert found.on_host == found.copies == []


def test_a_plain_step_crosses_eight_files():
    """None of them is hashtrain's. `test_kept.py` shows that the launches of its operators cross no others."""
    config, crossed = config_of("llama"), set()

    def note(frame, event, _):
        _, found, file = frame.f_code.co_filename.partition("/packages/")[2].partition("/src/")
        if event == "call" and found:
            crossed.add(file)

    selector = HashSelector(Hasher(HasherConfig("transform", ModelShape.of(config)), 0))
    with fake_gpu(), torch.inference_mode():
        model, cache = model_of(config), cache_of(config, "plain")
        ids = torch.zeros(ROWS, PROMPT, dtype=torch.long, device="cuda")
        model(ids, past_key_values=cache)
        with attach(model, selector, TENTH), told(PROMPT + 1):
            for token in range(3):
                sys.setprofile(note if token == 2 else None)
                try:
                    model(ids[:, :1], past_key_values=cache)
                finally:
                    sys.setprofile(None)
    crossed.discard("hashcore/torch_ops.py")  # the operator that searches
    names = ("interface", "budget", "caches/cache", "caches/buffer", "layer/plan", "hashing/encode_cuda")
    names += ("unselected/remainder", "attention/gather")
    assert crossed == {f"sparse_decode/{name}.py" for name in names}


def test_beams_over_host_memory_wait_for_what_was_written(monkeypatch):
    """Rows change places in host memory: once the device has written them, and by an index that is copied there."""
    config, waited, pinned = config_of("llama"), [], []

    class Stream:
        def synchronize(self):
            waited.append(sys._getframe(2).f_code.co_name)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(FakeTensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(FakeTensor, "pin_memory", lambda x: pinned.append(x.device.type) or x)
    selector = HashSelector(Hasher(HasherConfig("transform", ModelShape.of(config)), 0))
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
            assert waited == ["map_batch"] * 2 * config.num_hidden_layers, "keys and values of each layer"
            assert seen.copies == ["to"] * 2 * config.num_hidden_layers, "the index, for keys and for values"
            assert pinned == ["cpu"] * 2 * config.num_hidden_layers
            model(ids[:, :1], past_key_values=cache)
    assert len(waited) == 2 * config.num_hidden_layers


def test_a_step_of_eager_attention_with_padding_does_not_wait():
    """Its rows that see nothing get the mean of all values, which the host need not look for."""
    config = config_of("llama")
    config._attn_implementation = "eager"
    hasher = Hasher(HasherConfig("planes", ModelShape.of(config)), 0)
    with fake_gpu():
        found = steps(config, HashSelector(hasher), TENTH, "padded")
    assert "mean" in found.launching
    assert found.on_host == found.copies == []


@pytest.mark.parametrize("selector", [RecentSelector(), HashSelector(Hasher(HasherConfig("lsh", SHAPE), 0))])
def test_a_missing_compiler_is_said_when_a_model_of_a_gpu_is_attached(selector, monkeypatch):
    with fake_gpu():
        model = model_of(config_of("llama"))
        monkeypatch.setattr("sparse_decode.model.require_compiler", require_compiler)
        monkeypatch.setitem(sys.modules, "cuda.core", None)
        with pytest.raises(ValueError, match="needs cuda-core to compile its CUDA kernels, and it is not installed"):
            attach(model, selector, TENTH)


def test_the_harness_sees_host_memory():
    with fake_gpu(), Operators() as seen:
        torch.ones(3).add_(1)
    assert "add_" in seen.on_host


def test_the_harness_sees_sizes_that_depend_on_numbers():
    def looking(shown, *how):
        return positions.see(shown * shown.nonzero().shape[0], *how)

    with mock.patch("sparse_decode.layer.plan.see", looking), pytest.raises(DynamicOutputShapeException):
        beyond_dense("llama", "planes", kind="padded")


def _per_query_head(hasher):
    return HashSelector(QueryHeadHasher(hasher))


OF_LLAMA = "planes", "lsh", "paper", "paper-heads"
COMPILED = *(("llama", variant, False) for variant in OF_LLAMA), *((family, "transform", True) for family in FAMILIES)
QUICK = COMPILED[0], COMPILED[4], COMPILED[-1]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "variant", "remainder"), slow_but(QUICK, COMPILED))
def test_a_compiled_step_of_a_gpu_is_one_graph_on_it(family, variant, remainder):
    """torch.compile takes it whole, waits for nothing, and finds operators alone, none of them in host memory."""
    config, nodes = config_of(family), []
    hasher, of = Hasher(HasherConfig(variant.removesuffix("-heads"), ModelShape.of(config)), 0), HashSelector
    if variant.endswith("-heads"):
        of = _per_query_head

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
        with attach(model, of(hasher), TENTH, remainder=remainder):
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
    assert ours == OURS | ({"sparse_decode.add_in_place"} if remainder else set())


@pytest.mark.parametrize("name", slow_but(("transform+remainder", "transform+padded", "planes"), STORED))
def test_what_a_layer_does_is_what_is_stored(name):
    assert counted(name)._asdict() == STORED[name]


def test_a_layer_of_every_hasher_does_little():
    assert {name.split("+")[0] for name in STORED} == {"lsh", "paper", "planes", "transform"}
    for name in STORED:
        assert STORED[name]["operators"] <= 4, name
        assert STORED[name]["launches"] <= 6, name


@pytest.mark.sample(2)
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("variant", ["linear", "lsh", "paper", "planes"])
def test_every_hasher_of_ours_is_hashed_in_one_launch(variant, per_query_head):
    for kind in ("plain", "padded", "static"):
        found = beyond_dense("llama", variant, kind=kind, per_query_head=per_query_head)
        assert found.operators <= MOST[kind][0]
        assert found.launches <= MOST[kind][1]
        assert found.copies == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget", [LayerBudget(0.1, sink=0, recent=0), LayerBudget(0.1, sink=4, recent=16), LayerBudget(1.0)]
)
@pytest.mark.parametrize("kind", ["plain", "padded", "static"])
def test_whatever_is_always_read(budget, kind):
    assert beyond_dense("llama", "transform", budget, kind).launches <= MOST[kind][1]


def test_the_harness_sees_a_wait():
    def looking(shown, *how):
        return positions.see(shown * bool(shown.any()), *how)

    with mock.patch("sparse_decode.layer.plan.see", looking), pytest.raises(DataDependentOutputException):
        beyond_dense("llama", "planes", kind="padded")


@pytest.mark.parametrize(("heads", "taken"), [(16, True), (17, False)])
def test_the_sums_of_a_gpu_take_16_query_heads_a_kv_head(heads, taken):
    assert moments.MAX_GROUP == 16
    with fake_gpu(), torch.device("cuda"), torch.inference_mode():
        q = torch.zeros(1, 2 * heads, 1, 64, dtype=torch.bfloat16)
        k, slopes, running = torch.zeros(1, 2, 9, 64, dtype=torch.bfloat16), torch.zeros(2 * heads), RunningMoments()
        running.rows(q, slopes, k[:, :, :8], k[:, :, :8], None, 7, 8)
        assert (running.step(q, slopes, k, k) is not None) == taken
        if not taken:  # the long way, which waits no more than the short one
            assert running.rows(q, slopes, k, k, None, 8, 9)[0].shape == (1, 2, 1, 64)


def inputs(mask, tokens=20):
    q, k, v = (torch.randn(2, heads, n, 16) for heads, n in ((4, 1), (2, tokens), (2, tokens)))
    return AttentionArgs(q, k, v, mask, None, None, 0.25, None, None)


def test_a_mask_is_looked_at_once_a_step_even_if_its_numbers_change():
    sights, mask = Sights(), torch.ones(2, 1, 1, 20, dtype=torch.bool)
    plans = [LayerPlan(layer, RecentSelector(), TENTH, RowRule(None), sights=sights) for layer in (0, 1)]
    x = inputs(mask)
    with torch.inference_mode():
        found = [plan.see(x, mask) for plan in plans]
        assert found[0] is found[1]
        mask[:, :, :, :5] = False
        later = [plan.see(x, mask) for plan in plans]
    assert later[0] is later[1]
    assert (found[0].visible[:, 0].tolist(), later[0].visible[:, 0].tolist()) == ([20, 20], [15, 15])


def test_layers_that_take_part_in_some_steps_count_those():
    sights = Sights()
    plans = [LayerPlan(layer, RecentSelector(), TENTH, RowRule(None), sights=sights) for layer in (0, 1)]
    plans[0]._exact = plans[1]._exact = True
    for step in range(5):
        mask = torch.ones(2, 1, 1, 20, dtype=torch.bool)
        mask[0, :, :, :step] = False
        for plan in plans[: 1 if step in (1, 3) else 2]:
            plan.attend(inputs(mask))
    seen = [4 * (20 - step + 20) for step in range(5)]
    assert plans[0].tally.totals()[1] == sum(seen)
    assert plans[1].tally.totals()[1] == sum(seen[step] for step in (0, 2, 4))
