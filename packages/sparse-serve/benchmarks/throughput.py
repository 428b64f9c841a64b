"""Time decode steps of vLLM on the CPU with and without sparse attention, in an environment with vLLM and sparse-serve.

    PYTHON packages/sparse-serve/benchmarks/throughput.py --contexts 16384 32768 --out docs/results/serving.json

4 requests, 4 layers of 16 query and 4 KV heads of 128 in bfloat16, random weights, an untrained `transform` hash, 2 %.
Prompts are skipped: caches are filled with random numbers, which does not affect the time of a step. Each engine runs
in its own process. Engines are timed in turn, `--rounds` times, and the smallest median counts, because other load can
only add time. On a busy machine, `--processor-time` with OMP_NUM_THREADS=1 is more reliable than the clock. A result of
the same day, machine and settings keeps its rows of other contexts. The last line is JSON; --busy records in the result
that the machine had other work.
"""

# vLLM is installed only where this is run.
# pyright: reportMissingImports=false

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

REQUESTS, STEPS, PAGE, FRACTION, BITS = 4, 40, 128, 0.02, 128
MORE = 256  # room for generated tokens
SHAPE: dict[str, Any] = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 65536}


def make(folder: str) -> None:
    """Write the model and its hasher."""
    import torch
    from hashtrain import Hasher, HasherConfig, ModelShape
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.to(torch.bfloat16).save_pretrained(f"{folder}/model")
    Hasher(HasherConfig("transform", ModelShape.of(model.config), bits=BITS), 0).save_pretrained(f"{folder}/hasher")


def skip_prompts() -> None:
    """Skip the layers when processing prompts; `fill` writes the caches."""
    from vllm.model_executor.models.llama import LlamaDecoderLayer

    whole = LlamaDecoderLayer.forward

    def forward(own: Any, positions: Any, hidden_states: Any, residual: Any, *given: Any, **how: Any) -> Any:
        if len(positions) > REQUESTS:
            return hidden_states, hidden_states if residual is None else residual
        return whole(own, positions, hidden_states, residual, *given, **how)

    LlamaDecoderLayer.forward = forward


def fill(engine: Any, context: int) -> None:
    """Write random keys, values and codes to the first pages, which the requests will get.

    Random numbers are valid in the layouts of both engines.
    """
    import torch

    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    torch.manual_seed(0)
    for cache in runner.kv_caches:
        used = cache[: 1 + REQUESTS * (1 + (context + MORE) // PAGE)]
        page = used.stride(0)
        whole = used.as_strided((len(used), page), (page, 1))
        whole.view(torch.int32).random_(-(1 << 31), 1 << 31)  # the tail of each page: codes
        used.normal_()


def steps(folder: str, context: int, spotlight: dict[str, Any] | None, processor: bool) -> list[float]:
    """Return the times of decode steps over all requests in seconds: of the clock, or processor time."""
    clock = time.process_time if processor else time.perf_counter
    from vllm import LLM, SamplingParams

    asked = {} if spotlight is None else {"spotlight": spotlight}
    how: dict[str, Any] = dict(dtype="bfloat16", enforce_eager=True, block_size=PAGE, max_num_seqs=REQUESTS)
    how |= dict(max_model_len=context + MORE, enable_prefix_caching=False, max_num_batched_tokens=4096)
    engine: Any = LLM(f"{folder}/model", skip_tokenizer_init=True, additional_config=asked, **how).llm_engine
    skip_prompts()
    fill(engine, context)
    sampling = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, detokenize=False)
    for name in range(REQUESTS):
        tokens = [3 + (7 * i + name) % 500 for i in range(context)]
        engine.add_request(str(name), {"prompt_token_ids": tokens}, sampling)
    begun: set[str] = set()
    while len(begun) < REQUESTS:
        begun |= {x.request_id for x in engine.step() if x.outputs and len(x.outputs[0].token_ids)}
    taken = []
    for _ in range(10 + STEPS):
        start = clock()
        engine.step()
        taken.append(clock() - start)
    return taken[10:]


def measure(folder: str, context: int, ours: bool, processor: bool) -> float:
    """Return the median of an engine's steps, in ms."""
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    asked = {"hasher": f"{folder}/hasher", "fraction": FRACTION} if ours else None
    command = [sys.executable, __file__, "--work", json.dumps([folder, context, asked, processor])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return 1e3 * statistics.median(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time decode steps of vLLM with and without sparse attention.")
    parser.add_argument("--contexts", nargs="+", type=int, default=[16384, 32768])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, help="file for the result")
    parser.add_argument("--busy", action="store_true", help="record that the machine has other load")
    parser.add_argument("--processor-time", action="store_true", help="measure processor time; use with one thread")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return print(json.dumps(steps(*json.loads(given.work))))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make(folder)
        for context in given.contexts:
            pairs = [
                [measure(folder, context, ours, given.processor_time) for ours in (False, True)]
                for _ in range(given.rounds)
            ]
            stock, ours = (min(column) for column in zip(*pairs, strict=True))
            rows.append(
                {"context": context, "rounds": given.rounds, "stock": stock, "ours": ours, "ratio": stock / ours}
            )
            print(f"{context} tokens: {stock:.1f} ms, ours {ours:.1f} ms, {stock / ours:.2f} times", flush=True)
    found = facts(given.busy) | {"processor_time": given.processor_time}
    found["rows"] = sorted(kept(given.out, found, given.contexts) + rows, key=lambda row: row["context"])
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


def kept(path: pathlib.Path | None, settings: dict[str, Any], again: list[int]) -> list[dict[str, Any]]:
    """Return the rows of other contexts that a file has from the same day, machine and settings."""
    if path is None or not path.exists():
        return []
    rows = (before := json.loads(path.read_text())).pop("rows")
    return [row for row in rows if row["context"] not in again] if before == settings else []


def facts(busy: bool) -> dict[str, Any]:
    """Return the settings and the machine of the benchmark."""
    from importlib.metadata import version

    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "processor": processor, "busy": busy}
    found |= {"threads": int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))}
    found |= {"engine": f"vllm-cpu {version('vllm-cpu')}", "requests": REQUESTS, "steps": STEPS, "page": PAGE}
    return found | {
        "shape": SHAPE,
        "hasher": "transform",
        "bits": BITS,
        "fraction": FRACTION,
    }


if __name__ == "__main__":
    main()
