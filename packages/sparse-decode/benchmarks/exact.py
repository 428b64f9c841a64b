"""Measure exact mode: its acceptance, whether its greedy text equals the dense one, and its speed.

    uv run packages/sparse-decode/benchmarks/exact.py equal --model M --hasher H --text A.txt B.txt --context 8192
    uv run packages/sparse-decode/benchmarks/exact.py speed --model M --hasher H --text A.txt --lengths 2048 8192

equal: continues prompts from texts greedily with the plain model and in exact mode, with a fixed number of drafts (2, 4
and 8 in turn) and 2 % selected at any context length. Where a token differs, generation continues after the dense
token, so that every token of the dense text is compared. The two runs round differently (a check has several rows; the
plain model uses torch's attention), so tokens may differ at near-ties: `gap` is the difference of the dense model's
logits of the two tokens, `ulp` the same in units of the spacing of numbers of its dtype at that size. Each prompt is
stored when it is done; rerun to resume.

speed: tokens per second of the plain model, of an attached model that stays dense, and of exact mode. Runs alternate in
one process; ratios are medians over adjacent runs. Times are processor time with one thread, else wall time.

The last line is JSON.
"""

import argparse
import copy
import json
import pathlib
import statistics
import time
from typing import Any

import torch
from hashtrain import Hasher
from hashtrain.data.corpus import token_ids
from hashtrain.files.atomic import write_text
from hashtrain.models import load_model
from sparse_decode import Attachment, Budget, attach
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

DRAFTED = 2, 4, 8
NEVER = 1 << 30
OUT = pathlib.Path("docs/results/exact.json")


class Steady:
    """A pace that always drafts the same number of tokens."""

    def __init__(self, drafted: int):
        self.drafted = drafted

    def next(self, n: int) -> int:
        return self.drafted

    def could(self, n: int) -> bool:
        return True

    def learn(self, drafted: int, accepted: int) -> None:
        pass


def prompts_of(texts: list[pathlib.Path], tokenizer: Any, count: int, size: int) -> list[Tensor]:
    """Return `count` prompts of `size` tokens, evenly spaced, from each text in turn."""
    ids = [token_ids(path.read_text(encoding="utf-8"), tokenizer) for path in texts]
    per_text, found = -(-count // len(ids)), []
    for i in range(count):
        whole, place = ids[i % len(ids)], i // len(ids)
        first = (len(whole) - size) * place // max(1, per_text - 1)
        found.append(whole[first : first + size][None])
    return found


def filled(model: PreTrainedModel, ids: Tensor) -> DynamicCache:
    """Return a cache of all tokens except the last."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
    return cache


def go_on(model: PreTrainedModel, ids: Tensor, cache: DynamicCache, tokens: int, **options: Any) -> Any:
    """Continue ids greedily by `tokens` tokens; the cache has all of ids except the last."""
    how: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    more = {"past_key_values": cache, "attention_mask": mask, "max_new_tokens": tokens}
    generate: Any = model.generate
    return generate(ids, **more, **how, **options)


def differing(model: Any, attachment: Attachment, ids: Tensor, cache: Any, dense: Tensor, logits: Any) -> list[Any]:
    """Compare the exact text with the dense one, continuing after the dense token where they differ."""
    found: list[dict[str, Any]] = []
    done, n = 0, ids.shape[1]
    while done < len(dense):
        now = torch.cat([ids[0], dense[:done]])[None]
        cache.crop(now.shape[1] - 1 - cache.get_seq_length())
        made = go_on(model, now, cache, len(dense) - done).sequences[0, n + done :]
        unlike = (made != dense[done:]).nonzero()
        if not len(unlike):
            break
        first = int(unlike[0])
        at, other = done + first, int(made[first])
        scores = logits[at][0]
        top = scores[dense[at]].abs().to(model.dtype)  # logits come as float32
        step = (torch.nextafter(top, top.new_tensor(torch.inf)) - top).float()
        gap = scores[dense[at]] - scores[other]
        found.append({"at": at, "gap": round(float(gap), 6), "ulp": round(float(gap / step), 2)})
        done = at + 1
    return found


def equal(model: PreTrainedModel, hasher: Hasher, ids: Tensor, drafted: int, tokens: int) -> dict[str, Any]:
    """Continue one prompt densely and in exact mode, and compare."""
    cache = filled(model, ids)
    made = go_on(model, ids, copy.deepcopy(cache), tokens, output_logits=True)
    dense = made.sequences[0, ids.shape[1] :]
    with attach(model, hasher, Budget(), exact=drafted) as attachment:
        assert attachment.drafts is not None
        attachment.drafts.pace = lambda: Steady(drafted)  # pyright: ignore[reportAttributeAccessIssue]
        found = differing(model, attachment, ids, cache, dense, made.logits)
        checks, given, accepted = attachment.drafts.acceptance
    counts = {"checks": checks, "drafted": given, "accepted": accepted}
    return {"k": drafted, "tokens": tokens, **counts, "differ": found}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum the counts of prompts by dtype, context and number of drafts."""
    found = []
    for key in sorted({(row["dtype"], row["context"], row["k"]) for row in rows}):
        mine = [row for row in rows if (row["dtype"], row["context"], row["k"]) == key]
        total = {name: sum(row[name] for row in mine) for name in ("tokens", "checks", "drafted", "accepted")}
        differ = [difference for row in mine for difference in row["differ"]]
        rate = {"acceptance": round(total["accepted"] / total["drafted"], 4)}
        rate["tokens_per_check"] = round(1 + total["accepted"] / total["checks"], 3)
        gaps = {"differ": len(differ), "largest_ulp": max((difference["ulp"] for difference in differ), default=0)}
        named = dict(zip(("dtype", "context", "k"), key, strict=True))
        found.append({**named, "prompts": len(mine), **total, **rate, **gaps})
    return found


@torch.no_grad()
def run_equal(args: argparse.Namespace, model: PreTrainedModel, tokenizer: Any, hasher: Hasher) -> dict[str, Any]:
    """Run the prompts that are not stored yet."""
    stored = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"equal": []}
    rows: list[dict[str, Any]] = stored.get("equal", [])
    for index, ids in enumerate(prompts_of(args.text, tokenizer, args.prompts, args.context - args.tokens)):
        name = {"dtype": str(model.dtype).removeprefix("torch."), "context": args.context, "prompt": index}
        if any(name.items() <= row.items() for row in rows):
            continue
        rows.append({**name, **equal(model, hasher, ids, DRAFTED[index % len(DRAFTED)], args.tokens)})
        print(json.dumps(rows[-1]), flush=True)
        stored.update(equal=rows, summary=summary(rows))
        write_text(args.out, json.dumps(stored, indent=1) + "\n")
    return {"summary": summary(rows)}


@torch.no_grad()
def run_speed(args: argparse.Namespace, model: PreTrainedModel, tokenizer: Any, hasher: Hasher) -> dict[str, Any]:
    """Time the modes in turn at each length."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found = []
    for length in args.lengths:
        ids = prompts_of(args.text, tokenizer, 1, length)[0]
        cache, times, drafts = filled(model, ids), dict[str, list[float]](), [0, 0, 0]
        ways: dict[str, Any] = {"as it is": None, "dense": (Budget(dense_below=NEVER), None), "exact": (None, 8)}
        for _ in range(args.repeats):
            for way, how in ways.items():
                attached = None if how is None else attach(model, hasher, how[0], exact=how[1])
                began = clock()
                go_on(model, ids, cache, args.tokens)
                times.setdefault(way, []).append((clock() - began) / args.tokens)
                cache.crop(ids.shape[1] - 1 - cache.get_seq_length())
                if attached is not None:
                    made = attached.drafts.acceptance if attached.drafts is not None else (0, 0, 0)
                    drafts = [a + b for a, b in zip(drafts, made, strict=True)]
                    attached.detach()
        row: dict[str, Any] = {
            "n": length,
            "ms": {way: round(1e3 * statistics.median(t), 1) for way, t in times.items()},
        }
        for way in ("as it is", "dense"):
            ratios = [a / b for a, b in zip(times[way], times["exact"], strict=True)]
            row[f"{way} / exact"] = round(statistics.median(ratios), 3)
        found.append({**row, **dict(zip(("checks", "drafted", "accepted"), drafts, strict=True))})
        print(json.dumps(found[-1]), flush=True)
    return {"threads": torch.get_num_threads(), "speed": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("equal", "speed"))
    parser.add_argument("--model", required=True, help="a folder or hub id")
    parser.add_argument("--hasher", required=True, help="a hasher's folder or hub id")
    parser.add_argument("--text", nargs="+", required=True, type=pathlib.Path)
    parser.add_argument("--context", type=int, default=8192, help="prompt plus new tokens")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the model's own")
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help="file for the results of `equal`")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model, dtype=args.dtype and getattr(torch, args.dtype))
    run = run_equal if args.what == "equal" else run_speed
    print(json.dumps(run(args, model, tokenizer, Hasher.from_pretrained(args.hasher))))


if __name__ == "__main__":
    main()
