"""One run from text to stored hashers: capture, train layer by layer, calibrate, judge on held-out text, save."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import torch as safe
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import hashtrain
from hashtrain.atomic import write_text
from hashtrain.capture import Capture, capture, capture_bytes, require_disk
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.corpus import contexts, held_out_sources, python_sources, read_texts, split
from hashtrain.hasher import Hasher
from hashtrain.job import LayerJob, LayerResult, make
from hashtrain.judge import summarise
from hashtrain.models import load_model
from hashtrain.plan import DEMO, Candidate, TrainCommand
from hashtrain.progress import tracking
from hashtrain.report import card, draw, draw_bits, draw_heads, quality_table
from hashtrain.workers import default_workers, run_jobs

_NOT_FACTS = {"contexts", "held_out", "workers"}  # as asked for; the first two are stored as found


def run(command: TrainCommand, console: Console) -> dict[str, Any]:
    """Do what the command says and return its metrics; everything is stored below `command.out`.

    Raises: ValueError or OSError with one sentence, before anything is written, if the input cannot be used.
    """
    began = time.monotonic()
    model, tokenizer = load_model(command.model_path)
    if model.device.type == "cpu":
        model = model.float()  # many CPUs have no bfloat16 arithmetic and would take ten times as long
    shape = ModelShape.of(model.config)
    _check_model(command, model.config, shape)
    train_ids, held_ids = _texts(command, tokenizer)
    needed = capture_bytes(model, [*train_ids, *held_ids])
    require_disk(command.out, needed)
    console.print(
        f"{command.model}: {shape.num_layers} layers, {shape.num_query_heads} query / {shape.num_kv_heads} KV heads of "
        f"{shape.head_dim}; {len(train_ids)} contexts of {command.context} tokens to train on, {len(held_ids)} held "
        f"out; {needed / 1e9:.1f} GB of disk while it runs"
    )
    command.out.mkdir(parents=True, exist_ok=True)
    _remove_scratch_of_killed_runs(command.out)
    with tempfile.TemporaryDirectory(prefix=f".capture-{os.getpid()}-", dir=command.out) as scratch:
        with tracking(console, len(train_ids) + len(held_ids)) as advance:
            data = capture(model, train_ids, Path(scratch) / "train", lambda: advance("capture q and k", 1))
            held = capture(model, held_ids, Path(scratch) / "held", lambda: advance("capture held-out q and k", 1))
        hashers, found = _make_hashers(command, shape, model.config, data, held, console)
    metrics = {**_facts(command, shape, len(train_ids), len(held_ids)), "hashers": found}
    metrics["seconds"] = round(time.monotonic() - began, 1)
    for name, hasher in hashers.items():
        hasher.save_pretrained(command.out / name, card(hasher.config, name, metrics))
    for paint, name in ((draw, "training.png"), (draw_heads, "heads.png"), (draw_bits, "bits.png")):
        paint(metrics, command.out / name)
    write_text(command.out / "metrics.json", json.dumps(metrics, indent=1) + "\n")
    for heads in ("query_head", "kv_head"):
        console.print(quality_table(metrics, heads))
    return metrics


def _check_model(command: TrainCommand, config: Any, shape: ModelShape) -> None:
    """Refuse what this version cannot train, or would train wrongly."""
    config = config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    if longest and command.context > longest:
        raise ValueError(f"--context must be at most the model's {longest} tokens, got {command.context}")
    if command.dense_layers >= shape.num_layers:
        raise ValueError(f"--dense-layers must leave one of {shape.num_layers} layers, got {command.dense_layers}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"a model with full attention in every layer is needed, got {', '.join(sorted(kinds))}")
    if getattr(config, "attn_logit_softcapping", None):
        raise ValueError(f"a model with plain attention logits is needed, got {config.model_type}, which caps them")


def _remove_scratch_of_killed_runs(out: Path) -> None:
    for folder in out.glob(".capture-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _texts(command: TrainCommand, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Tensor], list[Tensor]]:
    if command.text:
        train, held = split(read_texts(list(command.text)))
    else:
        train, held = python_sources(), held_out_sources()
    return (
        contexts(train, tokenizer, command.context, command.contexts, command.seed),
        contexts(held, tokenizer, command.context, command.held_out, command.seed),
    )


def _make_hashers(
    command: TrainCommand, shape: ModelShape, model_config: Any, data: Capture, held: Capture, console: Console
) -> tuple[dict[str, Hasher], dict[str, Any]]:
    """Train and judge every layer of every candidate; return the hashers and what was found of each."""
    hashers = {c.name: Hasher(_config(command, c, shape, model_config), command.seed) for c in command.candidates}
    trained = [c for c in command.candidates if c.trained]
    untrained = [c for c in command.candidates if c not in trained]
    jobs = [
        LayerJob(command, candidate, hashers[candidate.name].config, layer, data, held)
        for candidate in (*trained, *untrained)  # the longest first
        for layer in range(shape.num_layers)
    ]
    with tracking(console, command.steps * shape.num_layers * len(trained) + len(jobs)) as advance:
        results = run_jobs(make, jobs, command.workers or default_workers(), advance)
    by_name: dict[str, list[LayerResult]] = {name: [] for name in hashers}
    for job, result in zip(jobs, results, strict=True):
        by_name[job.candidate.name].append(result)
        hashers[job.candidate.name].layer(job.layer).load_state_dict(safe.load(result.tensors))
    return hashers, {name: _found(layers, command.dense_layers) for name, layers in by_name.items()}


def _config(command: TrainCommand, candidate: Candidate, shape: ModelShape, model_config: Any) -> HasherConfig:
    return HasherConfig(
        variant=candidate.variant,
        shape=shape,
        bits=candidate.bits or command.bits,
        planes=command.planes,
        hidden=max(128, 2 * shape.head_dim) if candidate.variant == "paper" else 128,
        init=candidate.init,
        base_model=_base_model(command.model),
        base_revision=getattr(model_config, "_commit_hash", None),
    )


def _found(layers: list[LayerResult], dense_layers: int) -> dict[str, Any]:
    losses = [layer.losses for layer in layers if layer.losses]
    return {"losses": losses, **summarise([layer.quality for layer in layers], dense_layers)}


def _base_model(name: str) -> str:
    """Name the base model in an artefact: a hub id whole, a local folder without its path."""
    return "hashtrain demo" if name == DEMO else Path(name).name if Path(name).is_dir() else name


def _facts(command: TrainCommand, shape: ModelShape, contexts: int, held_out: int) -> dict[str, Any]:
    corpus = ", ".join(p.name for p in command.text) or "this machine's Python standard library"
    return {
        "version": hashtrain.__version__,
        "model": command.model if command.model == DEMO else Path(command.model).name,
        "layers": shape.num_layers,
        "corpus": corpus,
        "contexts": contexts,
        "held_out": held_out,
        **{k: v for k, v in asdict(command).items() if isinstance(v, int | float) and k not in _NOT_FACTS},
        "learning_rates": {c.name: c.learning_rate for c in command.candidates if c.trained},
    }


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
