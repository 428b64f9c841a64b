"""A streamed and measured generation, for the command line."""

# Configs of transformers, and some methods of torch, have no types.
# pyright: reportUnknownMemberType=false

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from hashtrain import Hasher
from hashtrain.data.corpus import token_ids
from hashtrain.demo import model_path
from hashtrain.device import device_for
from hashtrain.models import load_model, require_vocabulary, text_decoder
from hashtrain.usage import UsageError, require_plain_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from sparse_decode.attach import Attachment, attach
from sparse_decode.budget import Budget
from sparse_decode.select import HashSelector, LshSelector
from sparse_decode.settings import GenerateCommand

UNTRAINED = "lsh"
_MOST_BYTES = 1 << 28  # of a prompt: longer than any model's context
_LEAST = 16  # tokens that a step reads
_WARM_UP = 32  # prompt tokens of the warm-up, which compiles or loads the kernels


class TimedStreamer(TextStreamer):
    """Writes text as it is generated, and records the time of each token.

    Args: write: called with each piece of text; decoding: options of the tokenizer's `decode`.
    Attributes: times: seconds from the start to each new token; tokens: the new tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object], **decoding: Any):
        super().__init__(tokenizer, skip_prompt=True, **decoding)  # pyright: ignore[reportArgumentType]
        self._write, self._began = write, time.perf_counter()
        self.times: list[float] = []
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        """Receive the prompt first, then new tokens: one per call, or several that a check accepted together."""
        if not self.next_tokens_are_prompt:
            new = cast("list[int]", value.flatten().tolist())
            self.times += [time.perf_counter() - self._began] * len(new)
            self.tokens += new
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text + "\n" * stream_end)

    @property
    def tokens_per_second(self) -> float | None:
        """The rate after the first token, whose time includes the prefill; None if there was only one."""
        count = len(self.times)
        return (count - 1) / (self.times[-1] - self.times[0]) if count > 1 else None


def load_selector(hasher: str, model: PreTrainedModel) -> HashSelector:
    """Load a hasher from a folder or hub id; `lsh` gives untrained codes. Raises: ValueError if there is none."""
    if hasher == UNTRAINED:
        return LshSelector(text_decoder(model).config)
    return HashSelector(Hasher.from_pretrained(hasher))


@torch.no_grad()
def generate(command: GenerateCommand, out: TextIO) -> dict[str, Any]:
    """Load, generate and measure.

    Returns: the settings, the device and the type, and for `sparse` and, with --compare, `dense`: new tokens, seconds
        of prefill, which include the session, tokens per second after it, density, bytes of keys and values in all
        layers, bytes of codes, and tokens of the prompt that a session had stored.
    Raises: UsageError or ValueError if the prompt, the model or the hasher cannot be used.
    """
    text = read_text(command.prompt_file)
    model, tokenizer = _loaded(command)
    ids, document = _tokens(command, text, model, tokenizer)
    selector, budget = load_selector(command.hasher, model), Budget(command.fraction, _LEAST)

    def write(text: str) -> None:
        out.write(text)
        out.flush()

    placed = {"device": str(model.device), "dtype": str(model.dtype).removeprefix("torch.")}
    found: dict[str, Any] = {"model": command.model, "hasher": command.hasher, **placed, "prompt_tokens": ids.shape[1]}
    streamers: dict[str, TimedStreamer] = {}
    for name, chosen in (("sparse", selector), ("dense", None))[: 1 + command.compare]:
        if command.compare:
            write(f"--- {name}\n")
        with attach(model, chosen, budget, prompt=command.prompt if chosen else "exact") as attachment:
            warm_up(model, ids)
            attachment.reset_density()
            streamers[name] = TimedStreamer(tokenizer, write)
            own = chosen is not None or command.prompt == "exact"  # a file is of one kind of prompts
            cache, stored = _begun(attachment, command.session if own else None, ids, document)
            _run(model, ids, command.max_new_tokens, streamers[name], cache)
            found[name] = {**_measured(attachment, streamers[name], cache), "stored_tokens": stored}
    if command.compare:
        pairs = zip(streamers["sparse"].tokens, streamers["dense"].tokens, strict=False)
        differ = [i for i, (a, b) in enumerate(pairs) if a != b]
        shorter = min(len(streamer.tokens) for streamer in streamers.values())
        found["same_tokens"] = differ[0] if differ else shorter
    return found


def _loaded(command: GenerateCommand) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model of a command. Raises: before loading, if the device does not support the type."""
    device = device_for(command.device, 0)
    kind = command.dtype or ("bfloat16" if device.type == "cuda" else "auto")
    dtype = None if kind == "auto" else getattr(torch, kind)
    require_dtype(device, dtype)
    model, tokenizer = load_model(model_path(command.model), dtype, str(device))
    require_dtype(device, model.dtype)  # what `auto` selected
    return model, tokenizer


def require_dtype(device: torch.device, dtype: torch.dtype | None) -> None:
    """Raise ValueError for a type that sparse attention does not support on this device; None is not yet known."""
    if device.type == "cuda" and dtype == torch.float32:
        raise ValueError("attention over a selection on CUDA takes 16-bit types, got float32; give --dtype bfloat16")


def warm_up(model: PreTrainedModel, ids: Tensor) -> None:
    """Run a step after the first tokens of a prompt [1, T], to compile kernels before timing starts."""
    _run(model, ids[:, :_WARM_UP], 2, None, DynamicCache(config=model.config))


def _begun(attachment: Attachment, path: Path | None, ids: Tensor, document: int) -> tuple[DynamicCache, int]:
    """Return a cache of the first tokens of a prompt [1, T], and how many of them a session file had stored.

    Without such a file, the first `document` tokens are computed and stored there.
    """
    cache = DynamicCache(config=attachment.model.config)
    if path is None:
        return cache, 0
    if path.exists():
        cache, kept = attachment.load(path, ids)
        return cache, kept.shape[1]
    if not document:
        raise UsageError("--session needs a prompt of at least 2 tokens, got 1; leave it out")
    _run(attachment.model, ids[:, :document], 1, None, cache)
    attachment.save(cache, path, ids[:, :document])
    return cache, 0


def _run(model: PreTrainedModel, ids: Tensor, tokens: int, streamer: TimedStreamer | None, cache: DynamicCache) -> None:
    """Continue a prompt [1, T], of which the cache may hold the first tokens."""
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "past_key_values": cache, "do_sample": False}
    generation: Any = model.generation_config
    end: int | list[int] | None = generation.eos_token_id
    padding = end[0] if isinstance(end, list) else end
    model.generate(ids, max_new_tokens=tokens, streamer=streamer, pad_token_id=padding, **options)  # pyright: ignore[reportCallIssue]


def _measured(attachment: Attachment, streamer: TimedStreamer, cache: DynamicCache) -> dict[str, Any]:
    kv, codes = attachment.memory(cache)
    selected, visible = (sum(column) for column in zip((0, 0), *attachment.counts().values(), strict=True))
    return {
        "new_tokens": len(streamer.times),
        "prefill_seconds": streamer.times[0],
        "tokens_per_second": streamer.tokens_per_second,
        "density": selected / visible if visible else None,
        "kv_bytes": kv,
        "code_bytes": codes,
    }


def read_text(path: Path, flag: str = "--prompt-file") -> str:
    """Read the text file given by a flag. Raises: UsageError if it cannot be read, is not UTF-8, or is empty."""
    try:
        require_plain_file(path, flag)
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise UsageError(f"{flag} must have at most {_MOST_BYTES} bytes, got {size} in {path}")
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_BYTES)
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} must be UTF-8 text, got other bytes in {path}") from error
    except OSError as error:
        raise UsageError(f"cannot read {flag} {path}: {error.strerror}; name a text file") from error
    if not text.strip():
        raise UsageError(f"{flag} must not be empty, got {path}")
    return text


def _tokens(
    command: GenerateCommand, text: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[Tensor, int]:
    """Convert the prompt to ids [1, T] on the model's device, and count those of its text, of all but the last."""
    room = getattr(cast(Any, text_decoder(model).config), "max_position_embeddings", None)
    asked = "" if command.question is None else command.question
    text += "\n\n" if asked else ""
    # Each by itself, so that the text has the same tokens before every question.
    parts = token_ids(text, tokenizer, room, special=True), token_ids(asked, tokenizer)
    ids, document = torch.cat(parts)[None], min(len(parts[0]), len(parts[0]) + len(parts[1]) - 1)
    require_vocabulary(model, ids)
    if room is not None and ids.shape[1] + command.max_new_tokens > room:
        least = "at least " if ids.shape[1] > room else ""  # tokenising stops there
        raise UsageError(
            f"prompt and new tokens must fit the model's context of {room}, got {least}{ids.shape[1]} and "
            f"{command.max_new_tokens}; shorten the prompt, or use fewer --max-new-tokens"
        )
    return ids.to(model.device), document
