"""Train the demo model further on the tokens of tokens.py, from 2,048 to its full context of 4,096.

    uv run python tools/demo_model/train.py TOKENS_DIR OUT_DIR --minutes 75

Muon for the matrices, AdamW for all other parameters, learning rate linear to zero over the given time, bf16 autocast
with fp32 weights. One context in ten repeats a part of itself further on, so that the model learns to look far back. A
checkpoint that loads with plain `from_pretrained` is written every five minutes.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from hashtrain.data.corpus import held_out_sources
from hashtrain.demo import demo_model_path
from hashtrain.models import load_model
from transformers import AutoModelForCausalLM

CONTEXT = 4096
SHORT, CONTEXTS_PER_STEP = 2048, {2048: 4, 4096: 2}
WARMUP, PEAK_LR = 40, 1.5e-3
COPY_SHARE = 0.1


def sample(tokens, starts, context, rng):
    """Draw one context: half begin at the start of a document, COPY_SHARE repeat a part of themselves later on."""
    last = tokens.size - context
    at = int(starts[rng.integers(np.searchsorted(starts, last))]) if rng.random() < 0.5 else int(rng.integers(last))
    ids = tokens[at : at + context].astype(np.int64)
    if rng.random() < COPY_SHARE:
        length = int(rng.integers(32, 400))
        source = int(rng.integers(0, context - 2 * length))
        target = int(rng.integers(source + length, context - length))
        stretch = ids[source : source + length]
        if rng.random() < 0.3:  # in random order, so that only looking back can predict the copy
            rng.shuffle(stretch)
        ids[target : target + length] = stretch
    return ids


@torch.no_grad()
def held_out_loss(model, contexts, last=256):
    """Return the mean loss of the last tokens of each held-out context, in nats."""
    model.eval()
    losses = []
    for ids in contexts:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[None], logits_to_keep=last + 1).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.float(), ids[-last:]).item())
    model.train()
    return sum(losses) / len(losses)


def optimizers(model):
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return (
        torch.optim.Muon(matrices, lr=PEAK_LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0),
    )


def save(model, tokenizer, out: Path):
    bf16 = AutoModelForCausalLM.from_config(model.config, trust_remote_code=False, dtype=torch.bfloat16)
    bf16.load_state_dict(model.state_dict())
    fresh = out.with_name(out.name + ".new")
    bf16.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    for file in fresh.iterdir():
        os.replace(file, out / file.name)
    fresh.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=75)
    parser.add_argument("--init", type=Path, default=demo_model_path(), help="the model to continue from")
    parser.add_argument("--short-share", type=float, default=0.5, help="share of the time spent at contexts of 2,048")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokens, starts = np.load(args.tokens / "train.npy", mmap_mode="r"), np.load(args.tokens / "starts.npy")
    model, tokenizer = load_model(str(args.init), torch.float32)
    model = model.requires_grad_(True).train()
    texts = [d.text for d in held_out_sources()]
    validation = [tokenizer(text, return_tensors="pt", verbose=False).input_ids[0, :CONTEXT] for text in texts]
    validation = [ids for ids in validation if len(ids) == CONTEXT][::3]
    rng, optims = np.random.default_rng(args.seed), optimizers(model)
    begin = saved = time.monotonic()
    step, log = 0, (args.out / "train.jsonl").open("a")
    while (done := (time.monotonic() - begin) / (60 * args.minutes)) < 1:
        lr = PEAK_LR * min(1, (step + 1) / WARMUP) * (1 - done)
        for optim in optims:
            for group in optim.param_groups:
                group["lr"] = lr
        context = SHORT if done < args.short_share else CONTEXT
        contexts = [sample(tokens, starts, context, rng) for _ in range(CONTEXTS_PER_STEP[context])]
        batch = torch.from_numpy(np.stack(contexts))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        step += 1
        if step % 10 == 0 or step <= 3:
            seconds = time.monotonic() - begin
            row = {"step": step, "seconds": round(seconds), "loss": round(loss.item(), 4), "lr": lr}
            row["tokens_per_second"] = round(step * batch.numel() / seconds)
            if step % 150 == 0:
                row["held_out"] = round(held_out_loss(model, validation), 4)
            print(json.dumps(row), file=log, flush=True)
        if time.monotonic() - saved > 300:
            save(model, tokenizer, args.out)
            saved = time.monotonic()
    save(model, tokenizer, args.out)
    last = {"step": step, "held_out": held_out_loss(model, validation), "finished": True}
    print(json.dumps(last), file=log, flush=True)


if __name__ == "__main__":
    main()
