"""Rehearse the paper's training at full width on the CPU: one layer of Llama-3-8B, beside what `hashtrain plan` says.

    uv run tools/rehearse_paper.py --context 1024 --steps 3 --out docs/results/rehearsal.json

It makes a random model of one layer (hidden 4,096, 14,336 in its MLP, 32 query and 8 KV heads of 128) with the demo
model's tokenizer, trains `paper-exact` with --stream, measures it with `evals ppl`, and stores the disk and memory that
this took beside the plan's figures. Memory is counted beyond what the process took to run the model once.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from evals.cli import main as evals
from evals.machine import environment
from evals.result import rows_from_json
from evals.timing import read_peak
from hashtrain import Hasher
from hashtrain.cli import main as hashtrain
from hashtrain.cli import parse
from hashtrain.data.capture import run_context
from hashtrain.demo import demo_model_path
from hashtrain.files.atomic import write_text
from hashtrain.models import load_config, load_model, pretrained
from hashtrain.run.schedule import schedule
from hashtrain.settings.train_command import TrainCommand
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


def make_model(folder: pathlib.Path, layers: int = 1, **shape: int) -> None:
    """Store a random model of Llama-3-8B's width with the demo model's tokenizer, in bfloat16."""
    tokenizer = pretrained(AutoTokenizer, str(demo_model_path()))
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SHAPE, "head_dim": 128, "max_position_embeddings": 8192, **shape}
    sizes["num_hidden_layers"] = layers
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def only_the_model(model: str, context: int) -> int:
    """Load the model as a training does and run one context; return the peak memory."""
    found, _ = load_model(model, torch.float32, "cpu")
    run_context(found, torch.zeros(context, dtype=torch.long))
    return read_peak("cpu")


def stored(work: pathlib.Path) -> dict[str, int]:
    """Return the bytes of captures and of checkpoints in a run's working folder, also of what is replacing others."""
    sizes = {"disk": 0, "checkpoints": 0}
    for path in filter(pathlib.Path.is_file, work.rglob("*")):
        folder = path.parent.parent if path.parent.name.startswith(".hashcore-") else path.parent
        kind = "disk" if path.suffix == ".safetensors" and folder.name in ("train", "held") else None
        kind = "checkpoints" if folder.name == "layers" else kind
        if kind:
            sizes[kind] += path.stat().st_size
    return sizes


def training(model: str, context: int, words: list[str], out: pathlib.Path) -> dict[str, float]:
    """Run the model, then train; return both peaks of memory, the most bytes of captures and of checkpoints, and the
    seconds."""
    alone = only_the_model(model, context)
    most, began = stored(out / ".work"), time.monotonic()

    def look(event: str = "os.remove", _: object = None) -> None:
        """Look before anything is removed: between removals, files only grow."""
        if event in ("os.remove", "os.rename", "shutil.rmtree"):
            most.update({kind: max(size, most[kind]) for kind, size in stored(out / ".work").items()})

    sys.addaudithook(look)
    if code := hashtrain(words):
        raise SystemExit(code)
    look()
    seconds = round(time.monotonic() - began, 1)
    return {"memory": read_peak("cpu") - alone, **most, "seconds": seconds, "model_memory": alone}


def in_a_process(function: Callable[..., Any], *given: object) -> Any:
    """Call a function in a process of its own, whose peak memory is its own too."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, given)


def rehearse(folder: pathlib.Path, context: int, steps: int, text: list[str], **shape: int) -> dict[str, object]:
    """Train and evaluate; return planned and measured figures."""
    model, out = folder / "model", folder / "run"
    make_model(model, **shape)
    sizes = ["--context", context, "--contexts", steps, "--steps", steps, "--held-out", 1, "--held-out-rows", 16]
    words = ["--model", model, "--only", "paper-exact", "--stream", "--workers", 1, "--dense-layers", 0, *sizes, *text]
    words = [str(word) for word in [*words, "--out", out]]
    plan = schedule(cast(TrainCommand, parse(words)), load_config(str(model)))
    measured = in_a_process(training, str(model), context, words, out)
    measured["hasher"] = sum(path.stat().st_size for path in (out / "paper-exact").iterdir())
    run = ["--model", model, "--hashers", out, "--methods", "paper-exact", "--context", context, "--documents", 1]
    protocol = ["--budgets", 0.02, "--rules", "fixed", "--score", "all", "--sink", 0, "--recent", 0]
    if evals(["ppl", *map(str, [*run, *protocol]), "--out", str(folder / "ppl")]):
        raise SystemExit("evals ppl failed")
    rows = rows_from_json(json.loads((folder / "ppl" / "rows.json").read_text()))
    kl = next(row.value for row in rows if (row.method, row.metric) == ("paper-exact", "kl"))
    planned = {"disk": plan.streamed_disk, "memory": plan.streamed_memory, "model_memory": plan.model_memory}
    bits = Hasher.from_pretrained(out / "paper-exact").config.bits
    shown = {"context": context, "steps": steps, "parameters": plan.parameters, "bits": bits, "kl": kl}
    return {**shown, "planned": planned, "measured": measured, "environment": environment("cpu")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = rehearse(pathlib.Path(folder), given.context, given.steps, [])
    write_text(given.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
