"""Timings: their protocol with a fake clock, and that they run and leave the cache unchanged."""

import itertools
import json

import numpy as np
import pytest
import torch
from evals.results import read_result
from evals.tasks import throughput
from evals.tasks.throughput_settings import ThroughputCommand
from evals.timing import Turn, in_turns, quantiles
from hashtrain.config import ModelShape
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

TINY = {"contexts": (96,), "repeats": 2, "steps": 2, "warmup": 1, "hidden": 16, "bits": 32, "bandwidth": 10.0}


@pytest.fixture
def shape_folder(tmp_path):
    """A folder with only a tiny config."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaConfig(**sizes, num_key_value_heads=2, head_dim=16, vocab_size=64).save_pretrained(tmp_path / "shape")
    return str(tmp_path / "shape")


def test_methods_take_turns_warm_up_is_left_out_and_quantiles_are_those_of_numpy():
    said, ticks = [], itertools.count()

    def turn(name):
        return Turn(*(lambda i="", word=word: said.append(f"{name}{word}{i}") for word in (" begins", "", " ends")))

    times = in_turns({"a": turn("a"), "b": turn("b")}, 2, 1, 2, clock=lambda: float(next(ticks)))
    one = ["a begins", "a0", "a1", "a2", "a ends", "b begins", "b0", "b1", "b2", "b ends"]
    assert said == one * 2
    assert times == {"a": [[1.0, 1.0]] * 2, "b": [[1.0, 1.0]] * 2}
    # Two repeats of 1, 2, 3 and 3, 4, 5 seconds: the medians of the repeats are 2 and 4.
    found = quantiles([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]], seed=0)
    assert tuple(found["p50_ms"]) == (3000.0, 2000.0, 4000.0)
    assert found["p99_ms"].mean == pytest.approx(500 * (np.percentile([1, 2, 3], 99) + np.percentile([3, 4, 5], 99)))


@pytest.mark.slow
def test_throughput_measures_every_method(shape_folder, tmp_path):
    settings = {"shape": shape_folder, "batches": (1, 2), "dtype": "float32", "budget": 0.1, "out": tmp_path / "run"}
    command = ThroughputCommand(**TINY, **settings)
    found = throughput.run(command, Console(quiet=True))
    assert read_result(command.out).environment == found.environment
    assert found.environment["processor"]
    assert found.environment["threads"] == str(torch.get_num_threads())
    for batch in (1, 2):
        at = {"where": f"96 tokens x {batch}"}
        for method in command.methods:
            p50 = found.one(method=method, metric="p50_ms", **at)
            assert 0 < p50.value <= found.one(method=method, metric="p99_ms", **at).value
            assert p50.n == 2
            tokens = found.one(method=method, metric="tokens_per_s", **at)
            assert tokens.value == pytest.approx(1000 * batch / p50.value)
        # Three layers of 2 KV heads, 16 numbers of 4 bytes for a key and for a value; 99 tokens while it is measured.
        names = ("sdpa", "eager", "recent")
        sizes = [found.one(method=m, metric="kv_bytes", **at).value for m in names]
        assert sizes == [batch * 3 * 2 * 99 * 2 * 16 * 4] * 3
        steps = json.loads((tmp_path / "run" / "samples" / f"96x{batch}.json").read_text())["milliseconds"]
        assert {method: np.shape(taken) for method, taken in steps.items()} == dict.fromkeys(command.methods, (2, 2))
        assert found.one(method="sdpa", metric="code_bytes", **at).value == 0
        assert found.one(method="planes", metric="code_bytes", **at).value >= batch * 3 * 2 * 99 * 4
        assert 0.08 < found.one(method="planes", metric="p50_ms", **at).density < 0.12
        assert found.one(method="sdpa", metric="p50_ms", **at).density == 1


def test_bytes_of_a_step_worked_out_by_hand(shape_folder):
    command = ThroughputCommand(**TINY, shape=shape_folder, dtype="float32")
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(shape_folder), dtype=torch.float32)
    shape = ModelShape.of(model.config)
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    dense = throughput.step_bytes(model, shape, "sdpa", 1000, 2, command)
    assert dense == weights + 2 * 3 * 2 * 1000 * 2 * 16 * 4  # batch, layers, KV heads, tokens, a key and a value
    hashed = throughput.step_bytes(model, shape, "planes", 1000, 2, command)
    functions = 4 * (16 * 32 + 16 * 16 + 16 * 32) * (4 + 2)
    assert hashed == weights + 3 * (functions + 2 * 2 * (20 * 2 * 16 * 4 + 1000 * 4))
    assert throughput.step_bytes(model, shape, "recent", 1000, 2, command) < dense
