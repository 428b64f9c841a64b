"""Timings: their protocol with a fake clock, and that they run and leave the cache unchanged."""

import itertools
import json
import mmap

import numpy as np
import pytest
import torch
from evals.costs import dense_step
from evals.result import read_result
from evals.speed import KernelsCommand, ThroughputCommand
from evals.tasks import compiled, kernels, throughput
from evals.timing import Turn, in_turns, quantiles, read_bandwidth, read_peak, reset_peak
from hashtrain import Hasher, HasherConfig
from hashtrain.config import ModelShape
from hashtrain.usage import UsageError
from rich.console import Console
from sparse_decode import Budget, HashSelector, attach
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

TENTH = Budget(0.1, sink=0, recent=0)

QUIET = Console(quiet=True)
TINY = {"contexts": (96,), "repeats": 2, "steps": 2, "warmup": 1, "hidden": 16, "bits": 32, "bandwidth": 10.0}


@pytest.fixture
def shape_folder(tmp_path):
    """A folder with only a tiny config."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaConfig(**sizes, num_key_value_heads=2, head_dim=16, vocab_size=64).save_pretrained(tmp_path / "shape")
    return str(tmp_path / "shape")


def test_methods_take_turns_and_warm_up_is_left_out():
    said, ticks = [], itertools.count()

    def turn(name):
        return Turn(
            lambda: said.append(f"{name} begins"),
            lambda i: said.append(f"{name}{i}"),
            lambda: said.append(f"{name} ends"),
        )

    times = in_turns({"a": turn("a"), "b": turn("b")}, 2, 1, 2, clock=lambda: float(next(ticks)))
    one = ["a begins", "a0", "a1", "a2", "a ends", "b begins", "b0", "b1", "b2", "b ends"]
    assert said == one * 2
    assert times == {"a": [[1.0, 1.0]] * 2, "b": [[1.0, 1.0]] * 2}


def test_the_device_is_waited_for_before_and_after_each_step():
    waits = itertools.count()
    in_turns({"a": Turn(lambda: None, lambda i: None, lambda: None)}, 3, 1, 2, sync=lambda: next(waits))
    assert next(waits) == 2 * (1 + 3) * 2


def test_quantiles_worked_out_by_hand():
    # Two repeats of 1, 2, 3 and 3, 4, 5 seconds: the medians of the repeats are 2 and 4.
    found = quantiles([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]], seed=0)
    assert tuple(found["p50_ms"]) == (3000.0, 2000.0, 4000.0)
    assert found["p99_ms"].mean == pytest.approx(500 * (np.percentile([1, 2, 3], 99) + np.percentile([3, 4, 5], 99)))
    assert found["p50_ms"].mean < found["p90_ms"].mean < found["p99_ms"].mean


def test_bandwidth_is_a_plausible_number():
    assert 1e8 < read_bandwidth() < 1e13


@pytest.fixture
def traced(monkeypatch):
    """Compiled calls are traced into one graph and run by torch, without a C++ compiler and without minutes of work."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_throughput_measures_every_method(shape_folder, tmp_path, capsys, traced):
    command = ThroughputCommand(
        **TINY, shape=shape_folder, batches=(1, 2), dtype="float32", budget=0.1, out=tmp_path / "run"
    )
    found = throughput.run(command, Console(width=200))
    assert read_result(command.out).environment == found.environment
    assert found.environment["processor"]
    assert found.environment["threads"] == str(torch.get_num_threads())
    said = capsys.readouterr().out
    assert said.index("roofline: 10.0 GB/s") < said.index("96 tokens x 2, planes: at least") < said.index("p50_ms")
    for batch in (1, 2):
        at = {"where": f"96 tokens x {batch}"}
        for method in command.methods:
            p50 = found.one(method=method, metric="p50_ms", **at)
            assert 0 < p50.value <= found.one(method=method, metric="p99_ms", **at).value
            assert p50.n == 2
            tokens = found.one(method=method, metric="tokens_per_s", **at)
            assert tokens.value == pytest.approx(1000 * batch / p50.value)
        # Three layers of 2 KV heads, 16 numbers of 4 bytes for a key and for a value; 99 tokens while it is measured.
        names = ("sdpa", "eager", "recent", "compiled", "planes-compiled")
        sizes = [found.one(method=m, metric="kv_bytes", **at).value for m in names]
        assert sizes == [batch * 3 * 2 * 99 * 2 * 16 * 4] * 5
        steps = json.loads((tmp_path / "run" / "samples" / f"96x{batch}.json").read_text())["milliseconds"]
        assert {method: np.shape(taken) for method, taken in steps.items()} == dict.fromkeys(command.methods, (2, 2))
        assert found.one(method="sdpa", metric="code_bytes", **at).value == 0
        assert found.one(method="planes", metric="code_bytes", **at).value >= batch * 3 * 2 * 99 * 4
        # The sums of the remainder: counts, two vectors and a matrix per KV head, which tokens they count, how many.
        exact, rounded = 8 + 2 * 2 * 16 * 8 + 2 * 16 * 16 * 4, 2 * 16 * 16 + 2 * 16 * 4
        sums = 3 * batch * (exact + rounded + 99 + 2 * 8)
        assert found.one(method="planes-compiled", metric="code_bytes", **at).value == batch * 3 * 2 * 99 * 4 + sums
        for method in ("planes", "planes-compiled"):
            assert 0.08 < found.one(method=method, metric="p50_ms", **at).density < 0.12
        assert found.one(method="compiled", metric="p50_ms", **at).density == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("sparse", [False, True])
def test_compiled_steps_give_the_same_logits_as_plain_ones(shape_folder, traced, sparse):
    """Also after a rewind, which drops the tokens decoded since."""
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(shape_folder)
    model, shape = AutoModelForCausalLM.from_config(config).eval(), ModelShape.of(config)
    cache, tokens = DynamicCache(config=config), torch.tensor([[3], [5], [7]])
    throughput.fill(cache, shape, 64, 1, torch.float32, 0, "cpu")
    hasher = Hasher(HasherConfig("planes", shape, bits=32, hidden=16), 0)
    how = HashSelector(hasher) if sparse else None, TENTH, 1
    with torch.inference_mode():
        steps = compiled.CompiledSteps(model, cache, 3, *how)
        first = [steps.step(token[None]).clone() for token in tokens]
        steps.rewind()
        again = [steps.step(token[None]).clone() for token in tokens]
        with attach(model, *how[:2], dense_layers=1):
            plain = [model(token[None], past_key_values=cache).logits for token in tokens]
    torch.testing.assert_close(torch.stack(first), torch.stack(plain), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.stack(again), torch.stack(first), atol=0, rtol=0)


def test_compiled_methods_without_a_compiler_are_refused(shape_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    command = ThroughputCommand(**TINY, shape=shape_folder, out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"found no g\+\+ on PATH; .* leave compiled and planes-compiled out"):
        throughput.run(command, QUIET)
    assert not (tmp_path / "run").exists()
    compiled.require_compiler(("sdpa", "planes"), "cpu")


def in_pages(megabytes):
    """Use memory that comes from the system: an allocator may reuse what an earlier test freed."""
    size = megabytes << 20
    with mmap.mmap(-1, size) as pages:
        for at in range(0, size, mmap.PAGESIZE):
            pages[at] = 1
        return size


def test_the_peak_is_of_what_came_after_its_reset():
    in_pages(64)
    reset_peak("cpu")
    before = read_peak("cpu")
    size = in_pages(32)
    assert 0.9 * size < read_peak("cpu") - before < 1.5 * size


def test_bytes_of_a_step_worked_out_by_hand(shape_folder):
    command = ThroughputCommand(**TINY, shape=shape_folder, dtype="float32")
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(shape_folder), dtype=torch.float32)
    shape = ModelShape.of(model.config)
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    dense = throughput.step_bytes(model, shape, "sdpa", 1000, 2, command)
    assert dense == weights + 2 * 3 * 2 * dense_step(shape, 1000).bytes
    assert throughput.step_bytes(model, shape, "recent", 1000, 2, command) < dense


def test_a_filled_cache_has_the_requested_length(shape_folder):
    config = LlamaConfig.from_pretrained(shape_folder)
    cache = DynamicCache(config=config)
    throughput.fill(cache, ModelShape.of(config), 50, 2, torch.bfloat16, 0, "cpu")
    assert cache.get_seq_length() == 50
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(2, 2, 50, 16)] * 3
    assert cache.layers[0].keys.dtype == torch.bfloat16


def test_kernels_measures_every_step(shape_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "_MOST_COPIES", 2)
    found = kernels.run(KernelsCommand(**TINY, shape=shape_folder, out=tmp_path / "run"), QUIET)
    for step in ("hash", "score", "select", "search", "attend", "dense"):
        assert found.one(where=f"96 tokens, {step}", metric="p50_ms").value > 0
    share = found.one(where="96 tokens, score", metric="share_of_roofline").value
    p50 = found.one(where="96 tokens, score", metric="p50_ms").value
    assert share == pytest.approx(1000 * (96 * 2 * (4 + 4)) / 10e9 / p50)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ThroughputCommand(methods=("fast",)),
        lambda: ThroughputCommand(batches=(0,)),
        lambda: ThroughputCommand(repeats=0),
        lambda: ThroughputCommand(bandwidth=0.0),
        lambda: KernelsCommand(device="cuda"),
        lambda: KernelsCommand(bits=33),
    ],
)
def test_settings_that_cannot_be_used(make):
    with pytest.raises(UsageError, match=r"got|takes no"):
        make()
