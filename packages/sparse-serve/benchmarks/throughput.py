"""Time decode steps of vLLM on the CPU with and without a selection: with the Python of an environment that has both.

    PYTHON packages/sparse-serve/benchmarks/throughput.py --contexts 512 16384 32768

4 requests, 4 layers of 16 query and 4 KV heads of 128 in bfloat16, random weights, an untrained hash of 128 bits, 2 %.
Prompts are cached, not attended to, by both: what a step takes does not depend on it. Each engine is a process of its
own; they are timed in turn, `--rounds` times, and the least median counts, because a busy machine only ever adds to it.
The last line is JSON.
"""

# vLLM is installed only where this is run.
# pyright: reportMissingImports=false

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

REQUESTS, STEPS, PAGE = 4, 40, 128
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
    Hasher(HasherConfig("lsh", ModelShape.of(model.config), bits=128), 0).save_pretrained(f"{folder}/hasher")


def skip_prompts() -> None:
    """Let both ways write their caches and attend in decode steps only."""
    from sparse_serve import _backend

    for kind in (_backend.SpotlightImpl, _backend.CPUAttentionBackendImpl):
        kind.forward = without_prompts(kind.forward)


def without_prompts(whole: Any) -> Any:
    """Return an attention that answers zeros where a row has more than one token."""

    def forward(own: Any, *given: Any, output: Any, **how: Any) -> Any:
        if given[5] is None or given[5].max_query_len > 1:
            return output.zero_()
        return whole(own, *given, output=output, **how)

    return forward


def steps(folder: str, context: int, spotlight: dict[str, Any] | None) -> list[float]:
    """Return the seconds of decode steps of all requests at once."""
    from vllm import LLM, SamplingParams

    asked = {} if spotlight is None else {"spotlight": spotlight}
    how: dict[str, Any] = dict(dtype="bfloat16", enforce_eager=True, block_size=PAGE, max_num_seqs=REQUESTS)
    how |= dict(max_model_len=context + 256, enable_prefix_caching=False, max_num_batched_tokens=4096)
    engine: Any = LLM(f"{folder}/model", skip_tokenizer_init=True, additional_config=asked, **how).llm_engine
    skip_prompts()
    sampling = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, detokenize=False)
    for name in range(REQUESTS):
        tokens = [3 + (7 * i + name) % 500 for i in range(context)]
        engine.add_request(str(name), {"prompt_token_ids": tokens}, sampling)
    begun: set[str] = set()
    while len(begun) < REQUESTS:
        begun |= {x.request_id for x in engine.step() if x.outputs and len(x.outputs[0].token_ids)}
    taken = []
    for _ in range(10 + STEPS):
        start = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - start)
    return taken[10:]


def measure(folder: str, context: int, dense_below: int, ours: bool) -> float:
    """Return the median of an engine's steps, in ms."""
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    asked = {"hasher": f"{folder}/hasher", "fraction": 0.02, "dense_below": dense_below} if ours else None
    command = [sys.executable, __file__, "--work", json.dumps([folder, context, asked])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return 1e3 * statistics.median(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time decode steps of vLLM with and without a selection.")
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 16384, 32768])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dense-below", type=int, default=2048)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return print(json.dumps(steps(*json.loads(given.work))))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make(folder)
        for context in given.contexts:
            pairs = [
                [measure(folder, context, given.dense_below, ours) for ours in (False, True)]
                for _ in range(given.rounds)
            ]
            stock, ours = (min(column) for column in zip(*pairs, strict=True))
            rows.append({"context": context, "stock": stock, "ours": ours, "ratio": stock / ours})
            print(f"{context} tokens: {stock:.1f} ms, ours {ours:.1f} ms, {stock / ours:.2f} times", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
