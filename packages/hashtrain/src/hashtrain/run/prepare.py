"""Check a run's inputs before anything is written: the model, the texts, the disk space."""

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hashtrain.artefact.hasher import require_own
from hashtrain.config import ModelShape
from hashtrain.data.capture import require_disk
from hashtrain.data.corpus import held_out_sources, python_sources, split, tokenise_with, whole
from hashtrain.data.manifest import identity, known_weights, weights_hash, weights_record
from hashtrain.data.offsets import reach_of
from hashtrain.data.shares import room_for
from hashtrain.data.texts import list_texts, require_apart
from hashtrain.data.token_contexts import TokenContexts, key_of, sweep
from hashtrain.demo import base_model
from hashtrain.evaluation.remainder import MAX_CONTEXTS
from hashtrain.files.atomic import write_text
from hashtrain.machine.distribute import ALONE, Ranks, device_for
from hashtrain.machine.workers import default_workers, start_server
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
    reach: int
    """The longest context that the hashers are made for (`hashtrain.data.offsets`)."""
    train: Source
    validation: Source
    disk: int
    """Bytes that the missing captures will take."""
    device: str
    ranks: Ranks
    contexts: Sequence[Tensor]
    """Training contexts. `train` holds all of them, or, with --stream, only those that the remainder is fitted on; the
    others are tokenised when they are used."""
    identities: list[dict[str, Any]]
    """Identities of all training and held-out contexts; they decide the result."""
    reads: Reads
    """What training reads of each context."""
    texts: list[TokenContexts]
    """The training and held-out contexts, to be kept for the next start."""
    weights: dict[str, Any]
    """Digest of the weights, and of what files: to be kept for the next start."""

    def keep(self) -> None:
        """Store in the working folder what the next start need not compute again."""
        work = self.command.out / ".work"
        files = [work / "ids" / f"{name}.ids" for name in ("train", "held")]
        sweep(work / "ids", files)
        for texts, file in zip(self.texts, files, strict=True):
            texts.keep(file)
        write_text(work / "weights.json", json.dumps(self.weights) + "\n")

    @property
    def workers(self) -> int:
        """Number of worker processes that this process starts."""
        return workers_of(self.command, self.device, self.ranks)

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
    reach = reach_of(model.config, command.context, command.reach)
    for recipe in command.recipes:
        require_own(command.out / recipe.name, base_model(command.model), shape)
    if device == "cpu" and workers_of(command, device, ranks) > 1 and not command.dry_run:
        start_server()  # it imports on one core while this process tokenises on another
    found = _texts(command, tokenizer, ranks.first)
    texts = {"train": list(itertools.islice(found[0], MAX_CONTEXTS if command.stream else None)) or whole(found[0])}
    texts["held"] = whole(found[1])
    require_vocabulary(model, *texts["train"], *texts["held"])
    record = weights_record(command.model_path, model)
    weights = known_weights(command.out / ".work" / "weights.json", record) or weights_hash(model)
    own = {name: identity(model, ids, torch.bfloat16, command.seed, weights, reach) for name, ids in texts.items()}
    identities = [{**one} for one in own.values()]
    every, count = cast("Sequence[Tensor]", texts["train"]), len(texts["train"])
    if command.stream:  # the other contexts are known by what they are made of
        every, count = found[0], command.contexts
        identities[0] |= {"corpus": found[0].key, "contexts": count}
    shared = command.spread == "data" and ranks.world > 1
    reads = training_reads(command, shape, count, MAX_CONTEXTS, shared)
    both = {"train": reads, "held": validation_reads(command, shape, len(texts["held"]))}
    train, validation = (
        Source(name, command.out / ".work" / name, ids, own[name] | both[name].identity(len(ids)), both[name], reach)
        for name, ids in texts.items()
    )
    disk = sum(source.reads.bytes(source.lacking) for source in (train, validation))
    require_disk(command.out, disk, "" if command.stream else ", or --stream")
    ranks.barrier()  # rank 0 must not write while others still check
    kept = {"record": record, "hash": weights}
    settings = command, model.config, shape, reach, train, validation, disk, device, ranks
    return Prepared(*settings, every, identities, reads, found, kept)


def workers_of(command: TrainCommand, device: str, ranks: Ranks) -> int:
    """Return the number of worker processes that one of torchrun's processes starts on this machine."""
    if command.workers:
        return command.workers
    return max(1, default_workers() // ranks.local_world) if device == "cpu" else 1


def _check_spread(command: TrainCommand, ranks: Ranks) -> None:
    if command.stream and command.spread == "data":
        raise ValueError("--stream shares layers among processes, not data: use --spread layers")
    if command.spread == "data" and command.rows % ranks.world:
        raise ValueError(f"--rows must be a multiple of the {ranks.world} processes sharing them, got {command.rows}")


def _check_model(command: TrainCommand, config: Any, shape: ModelShape) -> None:
    """Reject models that this version cannot train, or would train wrongly."""
    config = config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    if longest and command.context > longest:
        raise ValueError(f"--context must be at most the model's {longest} tokens, got {command.context}")
    if command.dense_layers is not None and command.dense_layers >= shape.num_layers:
        raise ValueError(f"--dense-layers must leave one of {shape.num_layers} layers, got {command.dense_layers}")
    require_plain_attention(config)


def require_plain_attention(config: Any) -> None:
    """Raise ValueError if a model has attention that is measured wrongly: windows, chunks, capped logits."""
    config = config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"expected a model with full attention in every layer, got {', '.join(sorted(kinds))}")
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if window and not getattr(config, "layer_types", None):
        got = f"{config.model_type}, whose tokens see {window} others"
        raise ValueError(f"expected a model with full attention, got {got}")
    if getattr(config, "attn_logit_softcapping", None):
        raise ValueError(f"expected a model with plain attention logits, got {config.model_type}, which caps them")


def _texts(command: TrainCommand, tokenizer: PreTrainedTokenizerBase, first: bool) -> list[TokenContexts]:
    """Return the training and the held-out contexts, of which only those needed so far are tokenised.

    Args:
        first: whether this process, alone, may use the files of an earlier run, because it will add to them.
    Raises: ValueError if a text cannot be used, or a training document holds a held-out one.
    """
    most = 4 * (command.contexts + command.held_out)
    room = room_for(command.context * (command.contexts + command.held_out))
    train = list_texts(list(command.text), most, room, command.seed) if command.text else python_sources()
    if command.held_out_text:
        room = room_for(command.context * command.held_out)
        validation = list_texts(list(command.held_out_text), most, room, command.seed)
    elif command.text:
        train, validation = split(train)
    else:
        validation = held_out_sources()
    settings: dict[str, object] = {name: getattr(command, name) for name in ("context", "contexts", "held_out", "seed")}
    # One key for both: that they are apart is checked only where neither is known.
    key = hashlib.sha256("".join(key_of(texts, tokenizer, settings) for texts in (train, validation)).encode())
    named = zip(("train", "held"), (train, validation), (command.contexts, command.held_out), strict=True)
    found = [
        TokenContexts(
            texts,
            tokenise_with(tokenizer, command.context * count),
            command.context,
            count,
            command.seed,
            command.out / ".work" / "ids" / f"{name}.ids" if first else None,
            key.hexdigest()[:16],
        )
        for name, texts, count in named
    ]
    if not all(texts.stored for texts in found):
        whole(found[1])
        require_apart(train, [validation[number] for number in found[1].used])
    return found
