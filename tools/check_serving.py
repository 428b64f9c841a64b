"""Check sparse-serve inside vLLM, on the CPU: with the Python of an environment that has both.

    PYTHON tools/check_serving.py --hasher path/of/a/hasher/of/the/demo/model
    PYTHON tools/check_serving.py --hasher ... --parts exact budgets preemption poison others server

Every engine runs in a process of its own. exact: at a whole budget the tokens are those of vLLM without us. budgets: at
25 and 2 % they are those of `attach`, but where its own logits are as good as equal. 16 ragged requests each, two of
them with a shared prefix, twice: with a cold and with a warm prefix cache; pages of 32 and 128 tokens, chunks of 64 and
2,048. preemption: 20 at least, and all tokens right. poison: NaN in all pages that nobody owns, at every step. others:
tiny random models of other families. server: tools/check_server.py. Exit code 1, with what is wrong, if anything is.
"""

# vLLM is installed only where this is run.
# pyright: reportMissingImports=false

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TOKENIZERS_PARALLELISM": "false"}
PAGES = ((32, 64), (128, 2048))  # tokens of a page, tokens of a step
LENGTHS = (1, 2, 31, 32, 33, 64, 100, 129, 200, 257, 300, 400, 555, 1000)
SHARED, NEW = 260, 24
PREEMPTED = 20
GAP = 1e-2  # nats: logits of the demo model this close are as good as equal
TINY: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4}
TINY |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048}


def requests(vocabulary: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Prompts of many lengths, and two that begin alike."""
    draw = random.Random(0)
    prefix = [draw.randrange(3, vocabulary) for _ in range(SHARED)]
    made = [[draw.randrange(3, vocabulary) for _ in range(n)] for n in lengths]
    return [*made, [*prefix, 5, 6, 7], [*prefix, 9, 8]]


def engine(job: dict[str, Any]) -> dict[str, Any]:
    """Answer a job's prompts, each twice, by one engine: tokens, and what was counted."""
    from vllm import LLM, SamplingParams

    asked = {} if job["spotlight"] is None else {"spotlight": job["spotlight"]}
    how: dict[str, Any] = dict(dtype="float32", enforce_eager=True, max_model_len=2048, additional_config=asked)
    how |= dict(block_size=job["page"], max_num_batched_tokens=job["chunk"], max_num_seqs=16, disable_log_stats=False)
    model = LLM(job["model"], skip_tokenizer_init=True, **how, **job.get("more", {}))
    sampling = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": p} for p in job["prompts"]]
    if job.get("poison"):
        poison_each_step(model)
    passes = [model.generate(prompts, sampling, use_tqdm=False) for _ in range(2)]
    found: dict[str, Any] = {"tokens": [[list(x.outputs[0].token_ids) for x in outs] for outs in passes]}
    found["cached"] = [sum(x.num_cached_tokens or 0 for x in outs) for outs in passes]
    found["preemptions"] = sum(x.value for x in model.get_metrics() if x.name == "vllm:num_preemptions")
    if job["spotlight"] is not None:
        from sparse_serve.served import Served

        assert Served.latest is not None
        found["counts"] = Served.latest.counts()
    return found


def poison_each_step(model: Any) -> None:
    """Overwrite, before each step, all pages that no request owns: with NaN, and codes of ones."""
    import torch

    core = model.llm_engine.engine_core.engine_core
    caches = core.model_executor.driver_worker.worker.model_runner.kv_caches
    manager, run = core.scheduler.kv_cache_manager, core.model_executor.execute_model

    def execute_model(scheduled: Any, *rest: Any, **how: Any) -> Any:
        owned = {block for name in core.scheduler.requests for block in manager.get_block_ids(name)[0]}
        for cache in caches:
            page = cache.stride(0)
            whole = cache.as_strided((len(cache), page), (page, 1))
            free = [block for block in range(len(cache)) if block not in owned]
            whole.view(torch.int32)[free] = -1
        return run(scheduled, *rest, **how)

    core.model_executor.execute_model = execute_model


def attached(job: dict[str, Any]) -> dict[str, Any]:
    """Answer by `attach`, one prompt at a time: tokens, and for each the logits' lead over every other token."""
    import torch
    from hashtrain import Hasher
    from sparse_decode import Budget, attach
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    hasher, fraction = Hasher.from_pretrained(job["spotlight"]["hasher"]), job["spotlight"]["fraction"]
    how: dict[str, Any] = dict(max_new_tokens=job["new"], do_sample=False, pad_token_id=0, eos_token_id=None)
    how |= dict(return_dict_in_generate=True, output_logits=True)
    tokens, logits = [], []
    with torch.no_grad(), attach(model, hasher, Budget(fraction), remainder=False):
        for prompt in job["prompts"]:
            found: Any = model.generate(torch.tensor([prompt]), **how)
            tokens.append(found.sequences[0, len(prompt) :].tolist())
            logits.append([step[0].tolist() for step in found.logits])
    return {"tokens": tokens, "logits": logits}


WORK = {"engine": engine, "attached": attached}


def ask(kind: str, **job: Any) -> dict[str, Any]:
    """Do a job in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        (place / "job").write_text(json.dumps(job))
        command = [sys.executable, __file__, "--work", kind, str(place)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not (place / "found").exists():
            raise SystemExit(f"check_serving: {kind} failed: {done.stdout[-3000:]}")
        return json.loads((place / "found").read_text())


def differences(found: list[list[int]], expected: dict[str, Any]) -> tuple[int, list[str]]:
    """Compare with `attach`: how many part at a near-tie, and which part where there is none."""
    ties, wrong = 0, []
    for i, (mine, theirs) in enumerate(zip(found, expected["tokens"], strict=True)):
        at = next((j for j, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if at is not None:
            line = expected["logits"][i][at]
            gap = line[theirs[at]] - line[mine[at]]
            ties += gap <= GAP
            wrong += [f"request {i} parts at token {at} where logits lead by {gap:.4f}"] * (gap > GAP)
    return ties, wrong


def exact(job: dict[str, Any], hasher: str) -> list[str]:
    wrong = []
    for page, chunk in PAGES:
        where = job | {"page": page, "chunk": chunk}
        stock = ask("engine", **where, spotlight=None)
        ours = ask("engine", **where, spotlight={"hasher": hasher, "fraction": 1.0})
        equal = [
            [a == b for a, b in zip(x, y, strict=True)] for x, y in zip(stock["tokens"], ours["tokens"], strict=True)
        ]
        print(
            f"whole budget, pages of {page}, chunks of {chunk}: equal cold {sum(equal[0])}/{len(equal[0])}, warm "
            f"{sum(equal[1])}/{len(equal[1])}; from prefixes {ours['cached']}; tokens read {ours['counts']}",
            flush=True,
        )
        good = all(map(all, equal)) and ours["cached"] == stock["cached"] and ours["cached"][1] and ours["counts"][1]
        wrong += [] if good else [f"pages of {page}: not the tokens of vLLM alone"]
    return wrong


def budgets(job: dict[str, Any], hasher: str) -> list[str]:
    wrong = []
    for fraction in (0.25, 0.02):
        asked = {"hasher": hasher, "fraction": fraction}
        expected = ask("attached", **job, spotlight=asked)
        for page, chunk in PAGES:
            found = ask("engine", **job, page=page, chunk=chunk, spotlight=asked)
            for name, tokens in zip(("cold", "warm"), found["tokens"], strict=True):
                ties, others = differences(tokens, expected)
                same = sum(a == b for a, b in zip(tokens, expected["tokens"], strict=True))
                print(
                    f"{fraction:.0%}, pages of {page}, chunks of {chunk}, {name}: {same}/{len(tokens)} equal, "
                    f"{ties} part at near-ties, {len(others)} elsewhere {others}",
                    flush=True,
                )
                wrong += others
            density = found["counts"][0] / found["counts"][1]
            print(f"density {density:.3f}", flush=True)
            wrong += [] if density < 2 * fraction + 0.05 else [f"density {density} at {fraction}"]
    return wrong


def preemption(job: dict[str, Any], hasher: str) -> list[str]:
    long = [p[:300] + [4] * (300 - len(p[:300])) for p in job["prompts"]]
    tight = job | {"prompts": long, "new": 100, "page": 32, "chunk": 256, "more": {"num_gpu_blocks_override": 30}}
    stock = ask("engine", **{**tight, "more": {}}, spotlight=None)
    ours = ask("engine", **tight, spotlight={"hasher": hasher, "fraction": 1.0})
    equal = [a == b for x, y in zip(stock["tokens"], ours["tokens"], strict=True) for a, b in zip(x, y, strict=True)]
    print(
        f"{ours['preemptions']} preemptions (without: {stock['preemptions']}): {sum(equal)}/{len(equal)} equal",
        flush=True,
    )
    return (
        [] if all(equal) and ours["preemptions"] >= PREEMPTED else ["preemption changes tokens, or there were too few"]
    )


def poison(job: dict[str, Any], hasher: str) -> list[str]:
    wrong = []
    for fraction in (1.0, 0.02):
        asked = {"hasher": hasher, "fraction": fraction}
        more = {"enable_prefix_caching": False, "num_gpu_blocks_override": 300}
        how: dict[str, Any] = job | {"page": 32, "chunk": 256, "more": more, "spotlight": asked}
        clean, poisoned = ask("engine", **how), ask("engine", **how, poison=True)
        print(
            f"poison at {fraction:.0%}: {'nothing changes' if clean['tokens'] == poisoned['tokens'] else 'CHANGED'}",
            flush=True,
        )
        wrong += [] if clean["tokens"] == poisoned["tokens"] else [f"pages of nobody are read at {fraction}"]
    return wrong


def others(job: dict[str, Any], hasher: str) -> list[str]:
    """Tiny random models of other families, with untrained hashes."""
    import torch
    from hashtrain import Hasher, HasherConfig, ModelShape
    from transformers import Qwen3Config, Qwen3ForCausalLM

    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**TINY))
        model.save_pretrained(f"{folder}/model")
        Hasher(HasherConfig("lsh", ModelShape.of(model.config), bits=128), 0).save_pretrained(f"{folder}/hasher")
        mine = {"model": f"{folder}/model", "prompts": requests(512), "new": NEW}
        print("qwen3:", flush=True)
        for part in (exact, budgets):
            wrong += part(mine, f"{folder}/hasher")
    return wrong


PARTS = {"exact": exact, "budgets": budgets, "preemption": preemption, "poison": poison, "others": others}


def main() -> int:
    parser = argparse.ArgumentParser(description="Check sparse-serve inside vLLM.")
    parser.add_argument("--hasher", help="a hasher of the demo model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        kind, place = given.work[0], pathlib.Path(given.work[1])
        found = WORK[kind](json.loads((place / "job").read_text()))
        (place / "found").write_text(json.dumps(found))
        return 0
    from hashtrain.demo import demo_model_path

    job = {"model": str(demo_model_path()), "prompts": requests(4000), "new": NEW}
    wrong = [line for name in given.parts for line in PARTS[name](job, given.hasher)]
    print("\n".join(wrong) or "all well")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
