"""Metrics of a request equal what its layers count, and reach the server's registry."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode.budget import LayerBudget
from sparse_decode.pages import PagedLayer, Pages, Step
from sparse_decode.select import HashSelector
from sparse_serve.spent import spent

BUDGETS = {
    "2 %": LayerBudget(0.02),
    "at least 7": LayerBudget(0.02, min_tokens=7),
    "below 40 dense": LayerBudget(0.1, dense_below=40),
    "all": LayerBudget(1.0),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_lengths_alone_say_what_the_layers_count(name):
    budget, prompt, generated, size = BUDGETS[name], 33, 20, 32
    torch.manual_seed(0)
    layer = PagedLayer(0, HashSelector(Hasher(HasherConfig("lsh", ModelShape(1, 2, 1, 16), bits=32), 0)), 0.25)
    k, v = torch.randn(2, 3, 1, size, 16)
    pages = Pages(k, v, torch.randint(-9, 9, (3, 1, size, 1), dtype=torch.int32))
    for n in range(prompt + 1, prompt + generated):
        step = Step.of(torch.tensor([[2, 0, 1]]), torch.tensor([n]), budget, 3, size)
        layer.decode(torch.randn(1, 2, 16), pages, step)
    read, seen = spent(budget, prompt, generated)
    assert (2 * read, 2 * seen) == (layer.selected, layer.visible)  # of two query heads


class Registered:
    """A metric of prometheus_client, as far as it is used."""

    def __init__(self, name, *given, **more):
        self.name, self.seen = name, []

    def labels(self, *labels):
        assert labels == ("a model", "0")
        return self

    def __getattr__(self, name):
        return lambda value: self.seen.append(value)


@pytest.fixture
def made(monkeypatch):
    """The module of metrics, on stand-ins for vLLM and its client of Prometheus."""
    for name in ("prometheus_client", "vllm", "vllm.v1", "vllm.v1.metrics", "vllm.v1.metrics.loggers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for kind in ("Counter", "Gauge", "Histogram"):
        setattr(sys.modules["prometheus_client"], kind, Registered)
    sys.modules["vllm.v1.metrics.loggers"].StatLoggerBase = object
    monkeypatch.delitem(sys.modules, "sparse_serve._metrics", raising=False)
    yield importlib.import_module("sparse_serve._metrics")
    sys.modules.pop("sparse_serve._metrics")


def recorded(made, asked):
    model = SimpleNamespace(served_model_name="a model")
    logger = made.RequestMetrics(SimpleNamespace(additional_config=asked, model_config=model))
    ended = [SimpleNamespace(num_prompt_tokens=p, num_generation_tokens=n) for p, n in ((100, 3), (400, 2), (5, 1))]
    logger.record(None, SimpleNamespace(finished_requests=ended), mm_cache_stats=None, engine_idx=0)
    logger.record(None, None)
    return {metric.name: metric.seen for metric in made.metrics()}


def test_every_finished_request_is_counted_once(made):
    found = recorded(made, {"spotlight": {"hasher": "x", "fraction": 0.1, "dense_below": 102}})
    assert found["spotlight:request_density"] == [(101 + 10) / 203, 40 / 401]
    assert found["spotlight:tokens_read"] == [111, 40]
    assert found["spotlight:tokens_seen"] == [203, 401]


def test_an_engine_that_is_asked_for_nothing_counts_nothing(made):
    assert not any(recorded(made, {}).values())
