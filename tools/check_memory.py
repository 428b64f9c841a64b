"""Compare the memory forecast of `Attachment.forecast` with two runs: many sequences, and a long one.

    uv run tools/check_memory.py
    uv run tools/check_memory.py --out docs/results/memory.json   # for the table of docs/faults.md

A tiny random Llama is attached to a cache of random keys and values, as after a dense prefill, and takes a few steps.
The peak of the process' resident memory is measured, without the model, the keys and the values. Each run has its own
process, in which libraries have already allocated their buffers. Linux with glibc only. Exits 1 if a run took more than
the forecast.
"""

import argparse
import ctypes
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from evals.timing import read_peak, reset_peak
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.files.atomic import write_text
from sparse_decode import Budget, attach
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

CASES = ((64, 8_192), (1, 262_144))
STEPS = 4
WARM_UP = 1 << 16  # tokens: a few chunks of either case, so that libraries have allocated their buffers
MIB = 1 << 20
_MMAP_THRESHOLD = -3  # of glibc's malloc.h
LAYERS, HEADS, DIM = 4, 2, 16


def tiny_model(tokens: int) -> Any:
    """Create a random Llama of 4 layers, 4 query heads and 2 KV heads of 16."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": tokens}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def filled(model: Any, batch: int, tokens: int) -> Any:
    """Create a `DynamicCache` with random keys and values, layer by layer."""
    cache: Any = DynamicCache(config=model.config)
    for layer in cache.layers:
        keys, values = (torch.randn(batch, HEADS, tokens, DIM) for _ in range(2))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return cache


def steps(model: Any, cache: Any, count: int) -> None:
    """Run `count` decode steps."""
    batch, first = cache.layers[0].keys.shape[0], cache.get_seq_length()
    for at in range(first, first + count):
        model(torch.full((batch, 1), at % 97), past_key_values=cache, cache_position=torch.tensor([at]))


def peak_of(work: Callable[[], object] = lambda: None) -> int:
    """Return the peak of resident memory while `work` runs; without work, what is resident now."""
    reset_peak("cpu")
    work()
    return read_peak("cpu")


@torch.no_grad()
def measure(batch: int, tokens: int) -> dict[str, int]:
    """Return forecast and measured bytes."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 16)  # return freed memory at once; by default up to 64 MiB are kept
    model = tiny_model(tokens + STEPS)
    hasher = Hasher(HasherConfig("planes", ModelShape.of(model.config)))
    for layer in range(LAYERS):
        hasher.layer(layer).remainder.fill_(0.1)
    with attach(model, hasher, Budget()) as attachment:
        short = filled(model, batch, WARM_UP // batch)
        attachment.prepare(short)
        steps(model, short, 2)  # compiles the kernels
        del short
        libc.malloc_trim(0)
        before = peak_of()
        forecast, cache = attachment.forecast(batch, tokens + STEPS), filled(model, batch, tokens)
        base = before + sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        hashing = peak_of(lambda: attachment.prepare(cache))
        stepping = peak_of(lambda: steps(model, cache, STEPS))
    return {
        "keys and values": forecast.keys_values,
        "prompt, forecast": forecast.codes + forecast.prompt,
        "prompt, taken": hashing - base,
        "steps, forecast": forecast.codes + forecast.sums + forecast.spare + forecast.step,
        "steps, taken": stepping - base,
        "peak RSS": max(hashing, stepping),
    }


def main() -> int:
    """Print a line per run; return 1 if a run took more than the forecast."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write, in bytes")
    out = parser.parse_args().out
    runs = []
    for batch, tokens in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(measure, (batch, tokens))
        runs.append({"batch": batch, "tokens": tokens, **found})
        sizes = ", ".join(f"{name} {taken / MIB:,.0f} MiB" for name, taken in found.items())
        print(f"{batch} x {tokens:,} tokens: {sizes}", flush=True)
    if out is not None:
        write_text(out, json.dumps({"runs": runs}, indent=1) + "\n")
    over = sum(run[f"{phase}, taken"] > run[f"{phase}, forecast"] for run in runs for phase in ("prompt", "steps"))
    if over:
        print(f"expected no more than the forecast, got more in {over} places", file=sys.stderr)
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
