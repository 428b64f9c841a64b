"""Profile a training step on the CPU, and compare it with the peak rate of matrix products.

    uv run packages/hashtrain/benchmarks/step.py [--hasher planes] [--steps 100] [--out FILE]

One layer of the demo model's shape, random queries and keys, one thread, as in a worker of `hashtrain`. The peak is the
best float32 product of two square matrices in the same process; operations are torch's count for matrix products.
Prints a table, then JSON.
"""

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hashtrain import HasherConfig, ModelShape, TrainConfig
from hashtrain.data.capture import capture
from hashtrain.demo import demo_model_path
from hashtrain.files.atomic import write_text
from hashtrain.layers import BY_VARIANT
from hashtrain.machine.allocator import keep_freed_memory
from hashtrain.models import load_config
from hashtrain.settings.recipes import ALL
from hashtrain.training import trainer
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

CONTEXT, CONTEXTS, SQUARE, WARM = 4096, 2, 1024, 10
PARTS = ("read keys", "read queries", "exact attention", "draw pairs", "hash, score, loss", "backward", "AdamW")


class Clock:
    """CPU time of each part of a step: {part: [seconds per step]}."""

    def __init__(self):
        self.spent: dict[str, list[float]] = {part: [] for part in PARTS}

    @contextmanager
    def of(self, part: str):
        """Time a block."""
        began = time.process_time()
        yield
        self.spent[part].append(time.process_time() - began)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Time every call of a function."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            with self.of(part):
                return function(*arguments, **keywords)

        return call


def make_training(name: str, steps: int, scratch: Path) -> trainer.Training:
    """Build the training of one layer of the demo model's shape, with random weights and random tokens."""
    config = load_config(str(demo_model_path()))
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, config.vocab_size, (CONTEXTS, CONTEXT))
    data = capture(model, list(tokens), scratch)
    recipe = next(c for c in ALL if c.name == name)
    hasher_config = HasherConfig(recipe.variant, ModelShape.of(config), init=recipe.init)
    hasher = BY_VARIANT[recipe.variant](hasher_config, torch.Generator().manual_seed(0))
    return trainer.Training(hasher, 0, data, TrainConfig(steps=steps, learning_rate=recipe.learning_rate))


def measure(training: trainer.Training, steps: int) -> tuple[list[float], dict[str, float], int]:
    """Return the CPU seconds of each step, the median seconds of each part, and the operations of one step."""
    training.run(until=WARM)
    with FlopCounterMode(display=False) as counter:
        training.run(until=WARM + 1)
    clock, whole = Clock(), []
    patches = (
        mock.patch.object(training.data, "keys", clock.timed(PARTS[0], training.data.keys)),
        mock.patch.object(training.data, "queries", clock.timed(PARTS[1], training.data.queries)),
        mock.patch.object(trainer, "attention", clock.timed(PARTS[2], trainer.attention)),
        mock.patch.object(trainer, "sample_pairs", clock.timed(PARTS[3], trainer.sample_pairs)),
        mock.patch.object(trainer, "_loss", clock.timed(PARTS[4], trainer._loss)),
        mock.patch.object(torch.Tensor, "backward", clock.timed(PARTS[5], torch.Tensor.backward)),
        mock.patch.object(training.optimizer, "step", clock.timed(PARTS[6], training.optimizer.step)),
    )
    for patch in patches:
        patch.start()
    for step in range(WARM + 1, WARM + 1 + steps):
        began = time.process_time()
        training.run(until=step + 1)
        whole.append(time.process_time() - began)
    mock.patch.stopall()
    parts = {part: statistics.median(seconds) for part, seconds in clock.spent.items()}
    return whole, parts, counter.get_total_flops()


def peak(repeats: int = 30) -> float:
    """Return the operations per second of the best product of two square float32 matrices."""
    a, b = torch.randn(2, SQUARE, SQUARE)
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        a @ b
        best = min(best, time.process_time() - began)
    return 2 * SQUARE**3 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hasher", default="planes", choices=("paper", "planes", "transform"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as scratch:
        training = make_training(settings.hasher, WARM + 1 + settings.steps, Path(scratch) / "capture")
        before = peak()
        whole, parts, operations = measure(training, settings.steps)
    best, median = max(before, peak()), statistics.median(whole)
    share = operations / median / best
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"{part:20} {1e3 * seconds:7.2f} ms {seconds / median:6.1%}")
    print(f"{'a step':20} {1e3 * median:7.2f} ms, {operations / 1e9:.2f} G operations in products")
    print(f"{share:.0%} of the peak of {best / 1e9:.0f} G operations per second")
    found = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "hasher": settings.hasher,
        "steps": settings.steps,
        "milliseconds": round(1e3 * median, 3),
        "parts": {part: round(1e3 * seconds, 3) for part, seconds in parts.items()},
        "operations": operations,
        "peak": round(best),
        "share_of_peak": round(share, 4),
    }
    if settings.out:
        write_text(settings.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
