"""Compare decode steps with llama.cpp's on the CPU, with the same weights in 16 bits and the same number of threads.

    uv run --group llama-cpp packages/sparse-decode/benchmarks/llama_cpp.py --model runs/smollm2
    uv run --group llama-cpp packages/sparse-decode/benchmarks/llama_cpp.py --shape qwen2.5-0.5b --lengths 4096 16384

Without --model: random weights of a --shape. llama.cpp comes from the wheel `xllamacpp`. It gets a GGUF file of the
same weights in float16, a float16 cache, flash attention on, and processes the prompt itself, which takes most of the
time. Our models have bfloat16 weights, untrained `transform` hashers with arbitrary remainder coefficients, `attach`'s
default budget, and caches of random numbers, which do not affect the time of a step. `ours, dense` is an attached model
that stays dense: what our attention kernel and our cache save without sparsity. Contexts may be longer than in the
model's training, because only speed is measured.

At each length, all of them run in turn for several rounds. A round is the mean wall time of some steps; the result is
the median of the rounds. At the lengths of --beyond, llama.cpp would take hours to process the prompt, so its time is
extrapolated linearly from its shortest and its longest measured context. The last line is JSON.
"""

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
WAYS = {"as it is": "transformers", "attached": "ours", "dense layers": "ours, dense"}
STEPS, ROUNDS = 8, 5
LONGEST_DENSE = 1.0  # seconds: slower steps are timed once per round

Steps = Callable[[int], float]


class LlamaCpp:
    """llama.cpp in a separate process, which is stopped while idle: it would poll for work and slow the machine down.

    Args:
        path: a GGUF file; most: context size to allocate; threads: for steps and prompts.
    """

    def __init__(self, path: pathlib.Path, most: int, threads: int):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs, str(path), most, threads), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()  # it has loaded the model

    def complete(self, ids: list[int], count: int, reuse: bool = True) -> dict[str, Any]:
        """Continue a prompt greedily by `count` tokens, by default reusing what is cached of earlier prompts.

        Raises: RuntimeError if llama.cpp returns an error; EOFError if its process has died.
        """
        self._signal(signal.SIGCONT)
        try:
            self._pipe.send((ids, count, reuse))
            found = self._pipe.recv()
        finally:
            self._signal(signal.SIGSTOP)
        if "timings" not in found:
            raise RuntimeError(f"llama.cpp did not answer: {found}")
        return found

    def steps(self, ids: list[int]) -> Steps:
        """Return a function that times steps after a prompt, in milliseconds per step."""
        return lambda count: self.complete(ids, count)["timings"]["predicted_per_token_ms"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _answer(pipe: Connection, path: str, most: int, threads: int) -> None:
    """Load a model, send None, and answer each prompt received through a pipe."""
    given = xllamacpp.CommonParams()
    given.model.path = path
    given.n_ctx, given.n_parallel = most, 1
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = threads
    given.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    given.n_gpu_layers, given.warmup, given.ui, given.verbosity = 0, False, False, 1
    server = xllamacpp.Server(given)
    pipe.send(None)
    while True:
        ids, count, reuse = pipe.recv()
        asked = {"prompt": ids, "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": reuse}
        pipe.send(server.handle_completions({**asked, "return_tokens": True, "samplers": ["temperature"]}))


def ours(model: PreTrainedModel, n: int) -> Steps:
    """Return a function that times steps of our model at a context of n random tokens, in milliseconds per step."""
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
    """Return the instruction sets that llama.cpp was built for; wheels may not use all those of this CPU."""
    parts = xllamacpp.get_system_info().removeprefix("CPU :").split("|")
    return [name.strip() for name, _, used in (part.partition("=") for part in parts) if used.strip() == "1"]


@torch.no_grad()
def measure(llama: LlamaCpp | None, models: dict[str, PreTrainedModel], n: int, rounds: int) -> dict[str, Any]:
    """Time all models in turn at a context of n tokens, in milliseconds per step; llama: None to leave it out."""
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
    print(", ".join(f"{name} {row['ms']:.1f} ms" for name, row in found.items()), flush=True)
    return {"tokens": n, "steps": found}


def predicted(rows: list[dict[str, Any]], n: int) -> dict[str, Any]:
    """Extrapolate llama.cpp's milliseconds per step to n tokens linearly, from its first and its last row."""
    (a, before), (b, after) = ((row["tokens"], row["steps"]["llama.cpp"]["ms"]) for row in (rows[0], rows[-1]))
    return {"ms": after + (after - before) / (b - a) * (n - b), "rounds": [], "predicted": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub id; default: random weights")
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
    models = {name: attached for name, attached in attached_models(model).items() if name in WAYS}
    most = max(given.lengths) + STEPS + 1
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.gguf")
        write_gguf(model, path, context=most)
        llama = LlamaCpp(path, most, given.threads)
        # Longest first: shorter prompts are prefixes, which llama.cpp has cached.
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
