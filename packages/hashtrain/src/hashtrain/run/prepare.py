"""Check a run's inputs before anything is written: the model, the texts, the disk space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hashtrain.config import ModelShape
from hashtrain.data.capture import require_disk
from hashtrain.data.corpus import contexts, held_out_sources, python_sources, split
from hashtrain.data.manifest import identity, weights_hash
from hashtrain.data.shares import room_for
from hashtrain.data.texts import read_texts, require_apart
from hashtrain.evaluation.remainder import MAX_CONTEXTS
from hashtrain.machine.distribute import ALONE, Ranks, device_for
from hashtrain.models import require_vocabulary
from hashtrain.run.reads import Reads, training_reads, validation_reads
from hashtrain.run.sources import Source, loaded
from hashtrain.settings.train_command import TrainCommand


@dataclass(frozen=True)
class Prepared:
    """A command with checked inputs."""

    command: TrainCommand
    model_config: Any
    shape: ModelShape
    train: Source
    validation: Source
    disk: int
    """Bytes that the missing captures will take."""
    device: str
    ranks: Ranks
    contexts: list[Tensor]
    """Training contexts. `train` holds all of them, or, with --stream, only those that the remainder is fitted on."""
    identities: list[dict[str, Any]]
    """Identities of all training and held-out contexts; they decide the result."""
    reads: Reads
    """What training reads of each context."""

    @property
    def sources(self) -> list[Source]:
        """The training and the held-out source."""
        return [self.train, self.validation]


def prepare(command: TrainCommand, ranks: Ranks = ALONE) -> Prepared:
    """Load the model and the texts, and check what an earlier run has left; nothing is written.

    Raises: ValueError or OSError with one sentence if the command cannot be run.
    """
    _check_spread(command, ranks)
    device = str(device_for(command.device, ranks.local))
    model, tokenizer = loaded(command.model_path, device, command.backbone_memory)
    shape = ModelShape.of(model.config)
    _check_model(command, model.config, shape)
    texts = dict(zip(("train", "held"), _texts(command, tokenizer), strict=True))
    every = texts["train"]
    require_vocabulary(model, *every, *texts["held"])
    weights = weights_hash(model)

    def of(ids: list[Tensor]) -> dict[str, Any]:
        return identity(model, ids, torch.bfloat16, command.seed, weights)

    identities = [of(ids) for ids in texts.values()]
    if command.stream:
        texts["train"] = every[:MAX_CONTEXTS]
    shared = command.spread == "data" and ranks.world > 1
    reads = training_reads(command, shape, len(every), MAX_CONTEXTS, shared)
    both = {"train": reads, "held": validation_reads(command, shape, len(texts["held"]))}
    train, validation = (
        Source(name, command.out / ".work" / name, ids, of(ids) | both[name].identity(len(ids)), both[name])
        for name, ids in texts.items()
    )
    disk = sum(source.reads.bytes(source.lacking) for source in (train, validation))
    require_disk(command.out, disk, "" if command.stream else ", or --stream")
    ranks.barrier()  # rank 0 must not write while others still check
    return Prepared(command, model.config, shape, train, validation, disk, device, ranks, every, identities, reads)


def _check_spread(command: TrainCommand, ranks: Ranks) -> None:
    if command.stream and command.spread == "data":
        raise ValueError("--stream shares layers among processes, not data: use --spread layers")
    if command.spread == "data" and command.rows % ranks.world:
        raise ValueError(
            f"--rows must be a multiple of the {ranks.world} processes that share them, got {command.rows}"
        )


def _check_model(command: TrainCommand, config: Any, shape: ModelShape) -> None:
    """Reject models that this version cannot train, or would train wrongly."""
    config = config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    if longest and command.context > longest:
        raise ValueError(f"--context must be at most the model's {longest} tokens, got {command.context}")
    if command.dense_layers is not None and command.dense_layers >= shape.num_layers:
        raise ValueError(f"--dense-layers must leave one of {shape.num_layers} layers, got {command.dense_layers}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"expected a model with full attention in every layer, got {', '.join(sorted(kinds))}")
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if window and not getattr(config, "layer_types", None):
        raise ValueError(
            f"expected a model with full attention, got {config.model_type}, whose tokens see {window} others"
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise ValueError(f"expected a model with plain attention logits, got {config.model_type}, which caps them")


def _texts(command: TrainCommand, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Tensor], list[Tensor]]:
    most = 4 * (command.contexts + command.held_out)
    room = room_for(command.context * (command.contexts + command.held_out))
    train = read_texts(list(command.text), most, room, command.seed) if command.text else python_sources()
    if command.held_out_text:
        room = room_for(command.context * command.held_out)
        validation = read_texts(list(command.held_out_text), most, room, command.seed)
    elif command.text:
        train, validation = split(train)
    else:
        validation = held_out_sources()
    require_apart(train, validation)
    return (
        contexts(train, tokenizer, command.context, command.contexts, command.seed),
        contexts(validation, tokenizer, command.context, command.held_out, command.seed),
    )
