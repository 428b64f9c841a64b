"""Prompts of the serving checks, jobs in separate processes (answers of an engine or of `attach`), comparison.

PYTHON -m serving_checks.jobs engine path/or/folder     # reads its file `job`, writes its file `found`
"""

# vLLM is installed only where this runs.
# pyright: reportMissingImports=false

import json
import math
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from typing import Any

LENGTHS = (1, 2, 31, 32, 33, 64, 100, 129, 200, 257, 300, 400, 555, 1000)
SHARED = 260
GAP = 1e-2  # nats: closer logits are near-ties
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
QUIET |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TOKENIZERS_PARALLELISM": "false"}
QUIET |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # otherwise two ranks, or two checks, would share one core


def requests(vocabulary: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Return prompts of many lengths, including two with a shared prefix."""
    draw = random.Random(0)
    prefix = [draw.randrange(3, vocabulary) for _ in range(SHARED)]
    made = [[draw.randrange(3, vocabulary) for _ in range(n)] for n in lengths]
    return [*made, [*prefix, 5, 6, 7], [*prefix, 9, 8]]


def differences(found: list[list[int]], expected: dict[str, Any]) -> tuple[int, list[str]]:
    """Compare answers: return the number that differ at a near-tie, and a sentence for each that differs elsewhere.

    Args: expected: `tokens`, and the `logits` of `attach` at each; without them no difference is a near-tie.
    """
    ties, wrong = 0, []
    for i, (mine, theirs) in enumerate(zip(found, expected["tokens"], strict=True)):
        if mine == theirs:
            continue
        at = next((j for j, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), -1)
        line = expected["logits"][i][at] if "logits" in expected and at >= 0 else None
        gap = math.inf if line is None else line[theirs[at]] - line[mine[at]]
        ties += gap <= GAP
        wrong += [f"request {i} differs at token {at}, where logits lead by {gap:.4f}"] * (gap > GAP)
    return ties, wrong


def expected_counts(prompts: list[list[int]], new: int, fraction: float) -> tuple[int, int]:
    """Return how many tokens decode rows read and see, for one query head of one layer, from lengths alone.

    The first new token comes from the prompt's last row, every other from its own decode row.
    """
    import torch
    from sparse_decode.budget import LayerBudget

    seen = torch.cat([torch.arange(len(p) + 1, len(p) + new) for p in prompts])
    return int(LayerBudget(fraction).count(seen).sum()), int(seen.sum())


def engine(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job's prompts, each twice, in one engine: return the tokens and the counts."""
    from vllm import LLM, SamplingParams

    config = {} if job["spotlight"] is None else {"spotlight": job["spotlight"]}
    how: dict[str, Any] = dict(dtype="float32", enforce_eager=True, max_model_len=2048, additional_config=config)
    how |= dict(block_size=job["page"], max_num_batched_tokens=job["chunk"], max_num_seqs=16, disable_log_stats=False)
    model = LLM(job["model"], skip_tokenizer_init=True, **(how | job.get("more", {})))
    sampling = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True, detokenize=False)
    poisoned = poison_each_step(model) if job.get("poison") else [0]
    draws = [random.Random(seed) if job.get("arrivals") else None for seed in (1, 2)]
    passes = [answers(model.llm_engine, job["prompts"], sampling, draw) for draw in draws]
    found: dict[str, Any] = {"tokens": [[list(x.outputs[0].token_ids) for x in outs] for outs in passes]}
    found["cached"] = [sum(x.num_cached_tokens or 0 for x in outs) for outs in passes]
    found["preemptions"] = sum(x.value for x in model.get_metrics() if x.name == "vllm:num_preemptions")
    found["poisoned"] = poisoned[0]
    if job["spotlight"] is not None and "tensor_parallel_size" not in job.get("more", {}):
        from sparse_serve.served import Served

        served = Served.of(model.llm_engine.vllm_config)
        assert served is not None
        found["counts"] = served.counts()
    return found


def answers(core: Any, prompts: list[list[int]], sampling: Any, draw: random.Random | None) -> list[Any]:
    """Step an engine until all prompts are answered.

    Args:
        draw: draws how many requests arrive between two steps, 0 to 2; None: all before the first.
    """
    waiting, found = list(enumerate(prompts)), {}
    while waiting or core.has_unfinished_requests():
        for _ in range(len(waiting) if draw is None else draw.choice((0, 0, 0, 1, 2))):
            if waiting:
                index, tokens = waiting.pop(0)
                core.add_request(str(index), {"prompt_token_ids": tokens}, sampling)
        found |= {int(x.request_id): x for x in core.step() if x.finished}
    return [found[index] for index in range(len(prompts))]


def poison_each_step(model: Any) -> list[int]:
    """Before each step, overwrite all pages that no request owns, so that they hold NaN and wrong codes, all ones.

    Returns: the number of pages overwritten so far, in a list.
    """
    import torch

    core, total = model.llm_engine.engine_core.engine_core, [0]
    caches = core.model_executor.driver_worker.worker.model_runner.kv_caches
    manager, run = core.scheduler.kv_cache_manager, core.model_executor.execute_model

    def execute_model(scheduled: Any, *more: Any, **how: Any) -> Any:
        owned = {block for name in core.scheduler.requests for group in manager.get_block_ids(name) for block in group}
        for cache in caches:
            page = cache.stride(0)
            whole = cache.as_strided((len(cache), page), (page, 1))
            free = [block for block in range(len(cache)) if block not in owned]
            whole.view(torch.int32)[free] = -1
            total[0] += len(free)
        return run(scheduled, *more, **how)

    core.model_executor.execute_model = execute_model
    return total


def attached(job: dict[str, Any]) -> dict[str, Any]:
    """Answer with `attach`, one prompt at a time: return the tokens, and the logits of each step."""
    import torch
    from hashtrain import Hasher
    from hashtrain.models import pretrained
    from sparse_decode import attach
    from sparse_decode.budget import LayerBudget
    from transformers import AutoModelForCausalLM

    model: Any = pretrained(AutoModelForCausalLM, job["model"], dtype=torch.float32).eval()
    asked = job["spotlight"]
    hasher = Hasher.from_pretrained(asked["hasher"])
    budget = LayerBudget(asked["fraction"])
    how: dict[str, Any] = dict(max_new_tokens=job["new"], do_sample=False, pad_token_id=0, eos_token_id=None)
    how |= dict(return_dict_in_generate=True, output_logits=True)
    tokens, logits = [], []
    with torch.no_grad(), attach(model, hasher, budget, remainder=False):
        for prompt in job["prompts"]:
            found: Any = model.generate(torch.tensor([prompt]), **how)
            tokens.append(found.sequences[0, len(prompt) :].tolist())
            logits.append([step[0].tolist() for step in found.logits])
    return {"tokens": tokens, "logits": logits}


WORK = {"engine": engine, "attached": attached}


def ask(kind: str, **job: Any) -> dict[str, Any]:
    """Run a job in a separate process. Raises: SystemExit with the end of its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        (place / "job").write_text(json.dumps(job))
        command = [sys.executable, "-m", "serving_checks.jobs", kind, str(place)]
        path = os.pathsep.join([str(pathlib.Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")])
        how: dict[str, Any] = {"env": os.environ | QUIET | {"PYTHONPATH": path}, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, **how)
        if not (place / "found").exists():
            raise SystemExit(f"check_serving: {kind} failed: {done.stdout[-3000:]}")
        return json.loads((place / "found").read_text())


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[2])
    (folder / "found").write_text(json.dumps(WORK[sys.argv[1]](json.loads((folder / "job").read_text()))))
