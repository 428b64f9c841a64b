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
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import hashtrain
from hashtrain.atomic import write_text
from hashtrain.capture import Capture, capture, capture_bytes, require_disk
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.corpus import contexts, held_out_sources, python_sources, read_texts, split
from hashtrain.hasher import Hasher
from hashtrain.judge import judge
from hashtrain.models import load_model
from hashtrain.plan import DEMO, TrainCommand
from hashtrain.progress import tracking
from hashtrain.remainder import calibrate
from hashtrain.report import card, draw, quality_table
from hashtrain.trainer import TrainConfig, train_layer


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
        hashers, losses = _train(command, shape, model.config, data, console)
        with tracking(console, len(hashers) * shape.num_layers) as advance:
            for name, hasher in hashers.items():
                for layer in range(shape.num_layers):
                    calibrate(hasher.layer(layer), layer, data, command.seed)
                    advance(f"calibrate {name}, layer {layer}", 1)
        metrics = _facts(command, shape, len(train_ids), len(held_ids))
        with tracking(console, len(hashers) * shape.num_layers) as advance:
            for name, hasher in hashers.items():
                found = judge(command, hasher, held, lambda name=name: advance(f"judge {name}", 1))
                metrics["hashers"][name] = {"losses": losses[name], **found}
    metrics["seconds"] = round(time.monotonic() - began, 1)
    for name, hasher in hashers.items():
        hasher.save_pretrained(command.out / name, card(hasher.config, name, metrics))
    draw(metrics, command.out / "training.png")
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


def _train(
    command: TrainCommand, shape: ModelShape, model_config: Any, data: Capture, console: Console
) -> tuple[dict[str, Hasher], dict[str, list[list[float]]]]:
    hashers: dict[str, Hasher] = {}
    losses: dict[str, list[list[float]]] = {}
    for candidate in command.candidates:
        config = HasherConfig(
            variant=candidate.variant,
            shape=shape,
            bits=command.bits,
            planes=command.planes,
            hidden=max(128, 2 * shape.head_dim) if candidate.variant == "paper" else 128,
            init=candidate.init,
            base_model=_base_model(command.model),
            base_revision=getattr(model_config, "_commit_hash", None),
        )
        hasher = hashers[candidate.name] = Hasher(config, command.seed)
        losses[candidate.name] = []
        if not hasher.layer(0).trainable:
            continue
        settings = TrainConfig(
            fraction=command.fraction,
            steps=command.steps,
            learning_rate=candidate.learning_rate,
            min_position=command.context // 16,
            seed=command.seed,
        )
        with tracking(console, command.steps * shape.num_layers) as advance:
            for layer in range(shape.num_layers):

                def show(step: int, loss: float, layer: int = layer, name: str = candidate.name) -> None:
                    advance(f"train {name}, layer {layer}, loss {loss:.3f}", 1)

                losses[candidate.name].append(train_layer(hasher.layer(layer), layer, data, settings, show))
    return hashers, losses


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
        **{
            k: v for k, v in asdict(command).items() if isinstance(v, int | float) and k not in {"contexts", "held_out"}
        },
        "learning_rates": {c.name: c.learning_rate for c in command.candidates if c.variant != "lsh"},
        "hashers": {},
    }


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
