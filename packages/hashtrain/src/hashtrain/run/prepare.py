"""Check a run's inputs before anything is written: the model, the texts, the disk space."""

import collections
import hashlib
import itertools
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hashtrain.adapters import adapter_of
from hashtrain.config import ModelShape
from hashtrain.data.capture import context_key, free_disk, weights_hash
from hashtrain.data.captured import ALL, ROWS
from hashtrain.data.corpus import far_contexts, held_out_sources, numbered_contexts, python_sources, split
from hashtrain.data.offsets import longest_of, reach_of
from hashtrain.data.texts import apart, read_texts, room_for
from hashtrain.demo import base_model, model_path
from hashtrain.device import here
from hashtrain.evaluation.calibration import MAX_CONTEXTS
from hashtrain.hasher import require_own
from hashtrain.layers.transform import CONTEXTS as STARTED_FROM
from hashtrain.models import require_vocabulary, text_decoder
from hashtrain.run.settings import TrainCommand
from hashtrain.run.waves import Source, loaded, waves
from hashtrain.run.workers import default_workers


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
    far: Source
    """Contexts of about the reach, for calibration (`hashtrain.evaluation.calibration`); none if training's are."""
    waves: list[range]
    """The steps whose contexts are captured at once (`hashtrain.run.waves`)."""
    disk: int
    """Bytes of all captures that are stored at once."""
    device: str
    """`cpu`, `cuda` for one device a process, or `cuda:N`."""
    adapter: str
    """A digest of the model's adapter (`hashtrain.adapters`)."""
    identity: str
    """A digest of all contexts, which decide the result."""
    corpus: str
    """The text that was trained on, for reports: of several paths, how many contexts each gave."""

    @property
    def workers(self) -> int:
        """Number of worker processes."""
        return self.command.workers or default_workers(self.device)


def prepare(command: TrainCommand) -> Prepared:
    """Load the model and the texts, and check what an earlier run has left; nothing is written.

    Raises: ValueError or OSError with one sentence if the command cannot be run.
    """
    placed = here(command.device)
    device = command.device if command.device.startswith("cuda") else placed.type
    model, tokenizer = loaded(model_path(command.model), str(placed))
    shape = ModelShape.of(model.config)
    _check_model(command, model.config, shape)
    reach = reach_of(model.config, command.context, command.reach)
    for recipe in command.recipes:
        require_own(command.out / recipe.name, base_model(command.model), shape, adapter_of(model))
    eager = text_decoder(model).config._attn_implementation == "eager"  # needs memory for the square of a context
    texts, corpora, corpus = _texts(command, tokenizer, command.context if eager else reach)
    require_vocabulary(model, *itertools.chain(*texts))
    shared: dict[str, Any] = {"shape": shape, "weights": weights_hash(model), "device": device, "reach": reach}
    work = command.out / ".work"
    whole = STARTED_FROM if texts[2] else MAX_CONTEXTS  # calibration reads training contexts if there are no others
    train = Source("train", work / "train", texts[0], whole, torn=True, corpora=corpora, **shared)
    validation = Source("held", work / "held", texts[1], len(texts[1]), **shared)
    far = Source("far", work / "far", texts[2], len(texts[2]), first=ROWS, **shared)
    held = sum(of.bytes(range(len(of.contexts))) for of in (validation, far))
    always = held + train.bytes(range(min(whole, len(train.contexts))))
    room = free_disk(command.out) + sum(path.stat().st_size for path in work.glob("[thf]*/**/*.safetensors"))
    given = room if command.disk is None else min(room, int(1e9 * command.disk))
    parts = waves(train, command.steps, always, given)
    disk = held + max(train.bytes(train.stored_in(wave)) for wave in parts)
    identity = hashlib.sha256()
    for source in (train, validation, far):
        for number, ids in enumerate(source.contexts):
            identity.update(context_key(shared["weights"], ids, device[:4], ALL, source.places(number)).encode())
    checked = command, model.config, shape, reach, train, validation, far
    return Prepared(*checked, parts, disk, device, adapter_of(model), identity.hexdigest(), corpus)


def _check_model(command: TrainCommand, config: Any, shape: ModelShape) -> None:
    """Reject models that this version cannot train, or would train wrongly."""
    config = config.get_text_config(decoder=True)
    longest = longest_of(config)
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


def _texts(
    command: TrainCommand, tokenizer: PreTrainedTokenizerBase, reach: int
) -> tuple[list[list[Tensor]], int, str]:
    """Return the contexts of training, those held out, and those of calibration if they are others; the number of
    corpora among those of training; and `corpus`.

    Raises: ValueError if a text cannot be used, or one to train on holds one of --held-out-text.
    """
    room = room_for(command.context * (command.contexts + command.held_out))
    train = read_texts(list(command.text), room, command.seed) if command.text else python_sources()
    if command.held_out_text:
        room = room_for(command.context * command.held_out)
        validation = read_texts(list(command.held_out_text), room, command.seed)
    elif command.text:
        train, validation = split(train)
    else:
        validation = held_out_sources()
    held = numbered_contexts(validation, tokenizer, command.context, command.held_out, command.seed)
    used = [validation[number] for number in sorted({number for number, _ in held})]
    number = len(train)
    train = apart(train, used, given=bool(command.held_out_text))
    less = f" (texts left out that repeat held-out ones: {number - len(train)})" if len(train) < number else ""
    found = numbered_contexts(train, tokenizer, command.context, command.contexts, command.seed)
    given = collections.Counter(train[number].corpus for number, _ in found)
    names = [path.name if path.exists() else str(path) for path in command.text]
    counted = [f"{given[corpus]} of {name}" for corpus, name in enumerate(names)] if len(names) > 1 else names
    learnt, known = [ids for _, ids in found], (", ".join(counted) or "this machine's Python standard library") + less
    far = far_contexts(train, tokenizer, learnt, reach, command.seed)
    return [learnt, [ids for _, ids in held], far], len(given), known
