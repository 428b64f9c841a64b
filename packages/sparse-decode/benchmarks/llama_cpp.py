"""Time decode steps beside llama.cpp's, on the CPU, with the same weights in 16 bits and as many threads.

    uv run --group llama-cpp packages/sparse-decode/benchmarks/llama_cpp.py --model runs/smollm2
    uv run --group llama-cpp packages/sparse-decode/benchmarks/llama_cpp.py --shape qwen2.5-0.5b --lengths 4096 16384

Without --model, random weights of a shape. llama.cpp comes from the wheel `xllamacpp`; it gets a GGUF file of the same
weights in float16, its cache in float16, flash attention on, and reads the prompt itself: that takes most of the time.
Ours have bfloat16 weights, untrained `transform` hashers with some remainder, `attach`'s own default budget, and caches
filled with random numbers: the time of a step does not depend on them. The model is used beyond the context that it was
trained on: this is about speed only.

At each length all of them take turns, several rounds; a round is the mean of some steps by the clock, the time is the
median of the rounds. At the lengths of --beyond llama.cpp would read for hours: there its time is predicted, by the
line through its shortest and its longest measured context. The last line is JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pathlib
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

import torch
import xllamacpp
from gguf_file import write_gguf
from never_slower import attached_models, step_of
from results import machine, store
from shapes import SHAPES, make_model
from transformers import PreTrainedModel

LENGTHS = [4096, 8192, 16384, 32768]
WAYS = {"as it is": "transformers", "attached": "ours"}
STEPS, ROUNDS = 8, 5
LONGEST_DENSE = 1.0  # seconds: a way this slow is timed once a round

Steps = Callable[[int], float]


class LlamaCpp:
    """llama.cpp in a process of its own, which is stopped while it has nothing to do: idle, it polls for work, and
    makes everything beside it slower.

    Args:
        path: a GGUF file; most: tokens it must have room for; threads: of a step, and of a prompt.
    """

    def __init__(self, path: pathlib.Path, most: int, threads: int):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs, str(path), most, threads), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()  # it has loaded the model

    def complete(self, ids: list[int], count: int) -> dict[str, Any]:
        """Continue a prompt by the likeliest tokens; what it shares with the last prompt is not read again.

        Raises: RuntimeError if llama.cpp refuses; EOFError if it has died.
        """
        self._signal(signal.SIGCONT)
        try:
            self._pipe.send((ids, count))
            found = self._pipe.recv()
        finally:
            self._signal(signal.SIGSTOP)
        if "timings" not in found:
            raise RuntimeError(f"llama.cpp did not answer: {found}")
        return found

    def steps(self, ids: list[int]) -> Steps:
        """Return what times steps behind a prompt, in milliseconds a step."""
        return lambda count: self.complete(ids, count)["timings"]["predicted_per_token_ms"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _answer(pipe: Connection, path: str, most: int, threads: int) -> None:
    """Load a model, say so, and answer each prompt that comes through a pipe."""
    given = xllamacpp.CommonParams()
    given.model.path = path
    given.n_ctx, given.n_parallel = most, 1
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = threads
    given.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    given.n_gpu_layers, given.warmup, given.ui, given.verbosity = 0, False, False, 1
    server = xllamacpp.Server(given)
    pipe.send(None)
    while True:
        ids, count = pipe.recv()
        asked = {"prompt": ids, "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        pipe.send(server.handle_completions({**asked, "return_tokens": True, "samplers": ["temperature"]}))


def ours(model: PreTrainedModel, n: int) -> Steps:
    """Return what times steps of a model of ours behind n random tokens, in milliseconds a step."""
    config = model.config
    size = 2, 1, config.num_key_value_heads, n, config.hidden_size // config.num_attention_heads
    drawn = [torch.empty(size, dtype=model.dtype).normal_() for _ in range(config.num_hidden_layers)]
    step, cache = step_of(model, drawn)

    def timed(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            step()
        taken = time.perf_counter() - began
        cache.crop(-count)
        return 1e3 * taken / count

    timed(1)
    return timed


def instructions() -> list[str]:
    """Name what of the processor llama.cpp was built for: wheels are for older ones than this may be."""
    parts = xllamacpp.get_system_info().removeprefix("CPU :").split("|")
    return [name.strip() for name, _, used in (part.partition("=") for part in parts) if used.strip() == "1"]


@torch.no_grad()
def measure(llama: LlamaCpp | None, models: dict[str, PreTrainedModel], n: int, rounds: int) -> dict[str, Any]:
    """Time all of them in turns behind n tokens, in milliseconds a step; without llama.cpp if that is None."""
    ways = {WAYS[name]: ours(model, n) for name, model in models.items()}
    if llama is not None:
        ids = [7 + i * 7919 % 997 for i in range(n)]
        ways["llama.cpp"] = llama.steps(ids)
        began = time.perf_counter()
        llama.complete(ids, 1)
        print(f"{n:,} tokens: llama.cpp read the prompt in {time.perf_counter() - began:.0f} s", flush=True)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, steps in ways.items():
            slow = taken[name] and taken[name][-1] > 1e3 * LONGEST_DENSE
            taken[name].append(steps(1 if slow else STEPS))
    found = {name: {"ms": statistics.median(times), "rounds": times} for name, times in taken.items()}
    print(", ".join(f"{name} {each['ms']:.1f} ms" for name, each in found.items()), flush=True)
    return {"tokens": n, "steps": found}


def predicted(rows: list[dict[str, Any]], n: int) -> dict[str, Any]:
    """Return llama.cpp's milliseconds a step behind n tokens, by the line through its first and its last row."""
    (a, before), (b, after) = ((row["tokens"], row["steps"]["llama.cpp"]["ms"]) for row in (rows[0], rows[-1]))
    return {"ms": after + (after - before) / (b - a) * (n - b), "rounds": [], "predicted": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub id in place of random weights")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--beyond", type=int, nargs="*", default=[], help="longer contexts, without llama.cpp")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model = make_model(given.model, given.shape, None)
    models = {name: each for name, each in attached_models(model).items() if name in WAYS}
    most = max(given.lengths) + STEPS + 1
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.gguf")
        write_gguf(model, path, context=most)
        llama = LlamaCpp(path, most, given.threads)
        # The longest first: llama.cpp keeps what it has read of the others.
        rows = [measure(llama, models, n, given.rounds) for n in sorted(given.lengths, reverse=True)][::-1]
        llama.close()
    for n in given.beyond:
        rows.append(measure(None, models, n, given.rounds))
        rows[-1]["steps"]["llama.cpp"] = predicted(rows[: len(given.lengths)], n)
    found = {
        "model": pathlib.Path(given.model).name if given.model else given.shape,
        **machine(),
        "llama_cpp_uses": instructions(),
        "versions": {name: version(name) for name in ("xllamacpp", "transformers")},
        "rows": rows,
    }
    store(found, given.out)


if __name__ == "__main__":
    main()
