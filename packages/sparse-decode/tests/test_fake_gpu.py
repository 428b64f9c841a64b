"""A decode step on a GPU that is not there: nothing waits for it, nothing is copied, and operators are counted."""

import sys

import pytest
import torch
from fake_gpu import FAMILIES, KINDS, PROMPT, ROOM, ROWS, Operators, Tried, beyond_dense, config_of, fake_gpu, told
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import attach, budget, step
from sparse_decode.budget import LayerBudget
from sparse_decode.select import HashSelector
from sparse_decode_doubles import slow_but
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

MOST = {"plain": (12, 5), "padded": (12, 5), "static": (12, 6), "host": (12, 6), "beam": (12, 5)}
"""Operators and launches a layer of each kind of step, with the remainder, beyond those of a dense one."""
TENTH = LayerBudget(0.1)
BUDGETS = {
    "tenth": TENTH,
    "no ends": LayerBudget(0.1, sink=0, recent=0),
    "ends": LayerBudget(0.1, sink=4, recent=16),
    "by head": LayerBudget(0.1, by_head=(0.5, 1.5)),
}


def selector_of(variant="transform", family="llama"):
    """Its weights are real and in host memory, as those of a hasher that was loaded; it is placed when it is used."""
    hasher = Hasher(HasherConfig(variant.removesuffix("-heads"), ModelShape.of(config_of(family))), 0)
    return HashSelector(hasher, variant.endswith("-heads"))


CASES = [("llama", "transform", kind, captured, "tenth") for kind in KINDS for captured in (False, True)]
CASES += [("gpt_oss", "transform", kind, False, "tenth") for kind in ("plain", "static")]
QUICKLY = [*CASES, ("llama", "paper", "padded", False, "tenth"), ("llama", "planes-heads", "static", False, "tenth")]
QUICKLY += [("llama", "transform", "plain", False, "by head")]
CASES += [(family, "transform", kind, True, "tenth") for family in FAMILIES[1:] for kind in KINDS]
CASES += [
    ("llama", f"{variant}{heads}", kind, False, "tenth")
    for variant in ("linear", "lsh", "paper", "planes")
    for heads in ("", "-heads")
    for kind in ("plain", "padded", "static")
]
CASES += [("llama", "transform", kind, False, own) for own in BUDGETS for kind in KINDS if own != "tenth"]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("family", "variant", "kind", "captured", "own"), slow_but(QUICKLY, sorted({*CASES, *QUICKLY}))
)
def test_a_step_does_not_wait_and_its_operators_are_counted(family, variant, kind, captured, own, monkeypatch):
    """In a capture, too: there, each graph finds for itself what rows see, once for all of its layers."""
    if captured:
        for module in (step, budget):
            monkeypatch.setattr(module, "in_graph", lambda device: True)
        monkeypatch.setattr(step, "lane", lambda device: (0, 0, 1))
    with torch.inference_mode(captured):
        selector = selector_of(variant, family)
    found, more = beyond_dense(config_of(family), selector, BUDGETS[own], kind), int(own == "by head")
    operators, launches = MOST[kind]
    assert found.operators <= operators + more
    assert found.launches <= launches + more
    # The new key and value go to host memory; the host does not wait for them.
    assert found.copies == (2 if kind == "host" else 0)


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
        tried = Tried(config, "host")
        tried.call(PROMPT, PROMPT)
        with attach(tried.model, selector, TENTH, kv="host"), told(PROMPT + 1):
            for _ in range(2):
                tried.call(1, PROMPT + 1)
            assert waited == []
            with Operators() as seen:
                tried.cache.reorder_cache(torch.zeros(ROWS, dtype=torch.long, device="cuda"))
            assert waited == ["map_batch"] * twice, "keys and values of each layer"
            assert seen.copies == ["to"] * twice, "the index, for keys and for values"
            assert pinned == ["cpu"] * twice
            tried.call(1, PROMPT + 2)
    assert len(waited) == twice


def test_a_wait_is_seen(monkeypatch):
    see = step.seen_on_device
    monkeypatch.setattr(step, "seen_on_device", lambda interval, *how: see(interval * bool(interval.any()), *how))
    with pytest.raises(DataDependentOutputException):
        beyond_dense(config_of("llama"), selector_of("planes"), TENTH, "padded")


COMPILED = [("llama", variant, False) for variant in ("planes", "lsh", "paper", "paper-heads")]
COMPILED += [(family, "transform", True) for family in FAMILIES]
OURS = {"hashcore.search", "sparse_decode.gather", "sparse_decode.hash_tokens"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "variant", "remainder"), COMPILED[::-1])
def test_a_compiled_step_of_a_gpu_is_one_graph_on_it(family, variant, remainder):
    """torch.compile takes it whole, waits for nothing, and finds operators alone, none of them in host memory."""
    selector, nodes = selector_of(variant, family), []

    def backend(graph, given):
        nodes.append([node for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    torch._dynamo.reset()
    with fake_gpu(), torch.no_grad():
        tried = Tried(config_of(family), "static")
        tried.call(PROMPT, PROMPT)
        with attach(tried.model, selector, TENTH, remainder=remainder):
            with told(PROMPT + 1):
                tried.call(1, PROMPT + 1)
            torch.compile(tried.model, fullgraph=True, backend=backend)(**tried.operands(1, ROOM))
    torch._dynamo.reset()
    assert len(nodes) == 1
    values = [node.meta["example_value"] for node in nodes[0] if "example_value" in node.meta]
    assert {x.device.type for x in values if isinstance(x, torch.Tensor)} == {"cuda"}
    ours = {str(node.target) for node in nodes[0] if str(node.target).startswith(("hashcore.", "sparse_decode."))}
    assert ours == OURS | ({"sparse_decode.add_token"} if remainder else set())
