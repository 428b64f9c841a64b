"""One run from text to stored hashers: capture, train layer by layer, calibrate, judge on held-out text, save."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import hashtrain
from hashtrain.atomic import write_text
from hashtrain.capture import capture_bytes, require_disk
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.corpus import contexts, held_out_sources, python_sources, read_texts, split
from hashtrain.hasher import Hasher
from hashtrain.job import LayerJob, LayerResult, make, result
from hashtrain.judge import summarise
from hashtrain.manifest import identity
from hashtrain.plan import DEMO, Candidate, TrainCommand
from hashtrain.progress import live, tracking
from hashtrain.report import card, draw, draw_bits, draw_heads, quality_table
from hashtrain.sources import Source, loaded, make_all
from hashtrain.workers import default_workers, run_jobs
from hashtrain.workfolder import begin, end, locked

# As asked for; the first two are stored as found.
_NOT_FACTS = {"contexts", "held_out", "workers", "checkpoint_seconds"}


def run(command: TrainCommand, console: Console) -> dict[str, Any]:
    """Do what the command says and return its metrics; everything is stored below `command.out`.

    Raises: ValueError or OSError with one sentence, before anything is written, if the input cannot be used.
    """
    try:
        return _run(command, console)
    finally:
        loaded.cache_clear()


def _run(command: TrainCommand, console: Console) -> dict[str, Any]:
    began = time.monotonic()
    model, tokenizer = loaded(command.model_path)
    shape = ModelShape.of(model.config)
    _check_model(command, model.config, shape)
    train_ids, held_ids = _texts(command, tokenizer)
    sources = [
        Source(name, command.out / ".work" / name, ids, identity(model, ids, torch.bfloat16, command.seed))
        for name, ids in (("train", train_ids), ("held", held_ids))
    ]
    needed = sum(capture_bytes(model, [source.contexts[n] for n in source.lacking]) for source in sources)
    require_disk(command.out, needed)
    console.print(
        f"{command.model}: {shape.num_layers} layers, {shape.num_query_heads} query / {shape.num_kv_heads} KV heads of "
        f"{shape.head_dim}; {len(train_ids)} contexts of {command.context} tokens to train on, {len(held_ids)} held "
        f"out; {needed / 1e9:.1f} GB of disk while it runs"
    )
    with locked(command.out):
        hashers = {c.name: Hasher(_config(command, c, shape, model.config), command.seed) for c in command.candidates}
        jobs = _jobs(command, hashers, *sources)
        begin(command.out, _settings(command), {path.name for job in jobs for path in (job.finished, job.unfinished)})
        with tracking(console, sum(len(source.lacking) for source in sources)) as advance:
            make_all(command.model_path, sources, command.workers or default_workers(), advance)
        found = _make_hashers(command, hashers, jobs, console)
        metrics = {**_facts(command, shape, len(train_ids), len(held_ids)), "hashers": found}
        metrics["seconds"] = round(time.monotonic() - began, 1)
        for name, hasher in hashers.items():
            hasher.save_pretrained(command.out / name, card(hasher.config, name, metrics))
        for paint, name in ((draw, "training.png"), (draw_heads, "heads.png"), (draw_bits, "bits.png")):
            paint(metrics, command.out / name)
        write_text(command.out / "metrics.json", json.dumps(metrics, indent=1) + "\n")
        end(command.out)
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


def _texts(command: TrainCommand, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Tensor], list[Tensor]]:
    if command.text:
        train, held = split(read_texts(list(command.text)))
    else:
        train, held = python_sources(), held_out_sources()
    return (
        contexts(train, tokenizer, command.context, command.contexts, command.seed),
        contexts(held, tokenizer, command.context, command.held_out, command.seed),
    )


def _jobs(command: TrainCommand, hashers: dict[str, Hasher], train: Source, held: Source) -> list[LayerJob]:
    """List every layer of every hasher, the longest jobs first."""
    source = json.dumps([train.identity, held.identity], sort_keys=True)
    return [
        LayerJob(
            command,
            candidate,
            hashers[candidate.name].config,
            layer,
            train.stored,
            held.stored,
            source,
            command.out / ".work" / "layers",
        )
        for candidate in sorted(command.candidates, key=lambda c: not c.trained)
        for layer in range(hashers[candidate.name].config.shape.num_layers)
    ]


def _make_hashers(
    command: TrainCommand, hashers: dict[str, Hasher], jobs: Sequence[LayerJob], console: Console
) -> dict[str, Any]:
    """Train and judge what is left to do, put all layers into their hashers, and return what was found of each."""
    total = sum(1 + command.steps * job.candidate.trained for job in jobs)
    with tracking(console, total) as advance:
        run_jobs(make, jobs, command.workers or default_workers(), live(command.out / "metrics.jsonl", advance))
    by_name: dict[str, list[LayerResult]] = {name: [] for name in hashers}
    for job in jobs:
        found = result(job)
        by_name[job.candidate.name].append(found)
        hashers[job.candidate.name].layer(job.layer).load_state_dict(found.tensors)
        if found.stopped:
            console.print(f"{job.candidate.name}, layer {job.layer} {found.stopped}", highlight=False)
    return {name: _found(layers, command.dense_layers) for name, layers in by_name.items()}


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
    whole = [layer.losses for layer in layers if layer.losses and not layer.stopped]
    stopped = {str(number): layer.stopped for number, layer in enumerate(layers) if layer.stopped}
    found = {"losses": whole, **({"stopped": stopped} if stopped else {})}
    return {**found, **summarise([layer.quality for layer in layers], dense_layers)}


def _settings(command: TrainCommand) -> str:
    return json.dumps(asdict(command), indent=1, default=str) + "\n"


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
