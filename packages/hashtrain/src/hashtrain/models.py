"""Load a causal LM and its tokeniser from a folder or the hub, or fail with one sentence.

Everything that comes with a model is data. Only this module calls `from_pretrained` of transformers, and it runs no
code of a model, whatever arrives on standard input.
"""

# Configs of transformers, and some methods of torch, have no types.
# pyright: reportUnknownMemberType=false

import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from hashtrain.adapters import base_of, is_adapter, merged, tokenizer_of
from hashtrain.files.untrusted import one_line, read_json_object
from hashtrain.usage import file_kind

_ATTENTIONS = (None, "eager", "sdpa")
"""Allowed attention implementations. Any other name is a package or a kernel on the Hub, and so code."""
_NATIVE = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
"""Capabilities of a CPU, as torch names them, one of which multiplies a type of 16 bits."""
_COUNTED = re.compile(r"(num|n)_(\w+_)?(layers?|experts)")
_MOST_COUNTED = 1024
"""Limit on layers and experts: each is created before any weight is read. The largest known models have about 130 and
500."""
_REASON = 240  # characters kept of an error message of transformers, which may be a page long
_PROBE = "def f(x): return 1"
_MOST_TEXT_BYTES = 1 << 28
"""Largest file that is read whole and parsed; the largest known tokenizers have 40 MB."""
_TEXTS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
_READ = (*_TEXTS, ".safetensors", ".bin")
_REMEDY = "fetch the model again"


def load_model(
    name: str, dtype: torch.dtype | None = None, device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, ready for inference, and check it with a short forward pass.

    Args:
        name: a local folder, of a model or of a LoRA adapter (`hashtrain.adapters`), or a hub id.
        dtype: of its weights; None keeps their own, but takes float32 on a CPU without instructions for it.
        device: where it runs; None is the CPU.
    Raises: ValueError if there is no loadable model of that name, or it does not fit.
    """
    config = load_config(name)  # rejects configs that must not be built
    stored: Any = config.dtype or config.get_text_config(decoder=True).dtype
    if dtype is None and device in (None, "cpu") and _is_slow(stored):
        dtype = torch.float32
    base = base_of(name) if is_adapter(name) else name
    with _readable(name):
        tokenizer = cast(PreTrainedTokenizerBase, pretrained(AutoTokenizer, tokenizer_of(name)))
        model, report = pretrained(AutoModelForCausalLM, base, dtype=dtype or "auto", output_loading_info=True)
        if missing := sorted(report["missing_keys"]):
            raise ValueError(f"its weights lack {missing[0]}, one of {len(missing)} that would be random")
        model = merged(model, name) if base != name else model
    model = cast(PreTrainedModel, model.eval().requires_grad_(False))
    if device is not None:
        try:
            model = cast(Any, model).to(device)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"{name} does not fit on {device}: {error}; use --device cpu") from error
    with _readable(name):
        _take_a_step(model, tokenizer)
    return model, tokenizer


def _is_slow(dtype: Any) -> bool:
    """Return whether the CPU has no instructions for a type of 16 bits: prompts then take several times as long."""
    able: Mapping[str, Any] = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return dtype in _NATIVE and not any(able.get(name) for name in _NATIVE[dtype])


def load_config(name: str) -> PretrainedConfig:
    """Read the config of a model, a local folder or a hub id, without building the model; of an adapter, its base's.

    Raises: ValueError if there is none of that name, it cannot be read, or it requests something unsafe.
    """
    if is_adapter(name):
        _require_plain_files(Path(name))
        return load_config(base_of(name))
    if os.path.isdir(name):  # takes a name of any length
        if not (Path(name) / "config.json").is_file():
            raise ValueError(f"{name} holds no config.json: expected a folder written by save_pretrained")
        _require_plain_files(Path(name))
        found = read_json_object(Path(name) / "config.json", _REMEDY, strict=False)
        if "variant" in found and "model_type" not in found:
            raise ValueError(f"{name} is a hasher, expected a model; hashers are given by --hashers or --hasher")
    elif ("/" in name or name.startswith(".")) and not _is_hub_id(name):
        raise ValueError(f"model folder not found: expected a Hugging Face model at {name}")
    with _readable(name):
        found, _ = cast("tuple[dict[str, Any], Any]", PretrainedConfig.get_config_dict(name))
        _require_bounded(found)  # a config creates lists with one entry per layer
        config = cast(PretrainedConfig, pretrained(AutoConfig, name))
        _require_plain_attention(config)
    return config


def from_config(config: PretrainedConfig, **more: Any) -> PreTrainedModel:
    """Create a model from a config, with random weights; `more` are arguments of transformers' `from_config`.

    Raises: ValueError if no model can be created from the config.
    """
    with _readable(config.name_or_path or f"of a {type(config).__name__}"):
        return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, trust_remote_code=False, **more))


def pretrained(kind: Any, name: str, **more: Any) -> Any:
    """Call `from_pretrained` of one of transformers' Auto classes, without running code that comes with the model.

    By default transformers asks on standard input whether to run it, and takes a piped `y` for consent.
    """
    with _quiet():
        return kind.from_pretrained(name, trust_remote_code=False, **more)


def require_vocabulary(model: PreTrainedModel, *contexts: Tensor) -> None:
    """Raise ValueError if a token of the contexts, int64 [...], has no row in the model's embeddings."""
    rows = cast(Any, model.get_input_embeddings()).weight.shape[0]
    largest = max((int(ids.max()) for ids in contexts if len(ids)), default=0)
    if largest >= rows:
        raise ValueError(
            f"the tokenizer produced token {largest}, expected less than {rows}, the rows of the model's embeddings; "
            "use the tokenizer that the model was trained with"
        )


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that decodes text; in some models `decoder` is the output projection."""
    found = cast(object, model.get_decoder())
    return cast(PreTrainedModel, found if hasattr(found, "config") else model.base_model)


@contextlib.contextmanager
def _readable(name: str) -> Generator[None]:
    """Turn any error that transformers raises on a model's files into one sentence naming it. Raises: ValueError."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} are truncated or damaged ({error}); fetch them again") from error
    except Exception as error:  # odd configs and tokenizers raise any kind of error; Rust code raises bare Exception
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        reason = textwrap.shorten(kind + one_line(error), _REASON, placeholder=" ...")
        if isinstance(error, OSError) and not os.path.isdir(name):  # a page of advice follows the first sentence
            reason = f"there is no folder of that name, and none on the Hub: {reason.split('. ')[0]}"
        raise ValueError(f"cannot load the model {name}: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Hide progress bars unless stderr is a terminal: redrawn lines would fill a log file."""
    shown = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _require_bounded(found: dict[str, Any]) -> None:
    """Reject counts that would take hours or all memory to build. Raises: ValueError."""
    for key, value in found.items():
        if isinstance(value, dict):
            _require_bounded(cast("dict[str, Any]", value))
        elif _COUNTED.fullmatch(key) and isinstance(value, int) and not 0 <= value <= _MOST_COUNTED:
            raise ValueError(f"its config.json says {key} {value}, expected 0 to {_MOST_COUNTED}")


def _require_plain_attention(config: PretrainedConfig) -> None:
    """Reject an attention implementation that would have to be downloaded or installed. Raises: ValueError."""
    inner = cast("dict[str, object]", config.sub_configs)
    for part in (config, *(getattr(config, key, None) for key in inner)):
        asked = cast(object, getattr(part, "_attn_implementation", None))
        if asked not in _ATTENTIONS:
            raise ValueError(f"its config.json requests attention {asked!r}, expected eager, sdpa or none")


@torch.inference_mode()
def _take_a_step(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Run one line of text through the model, so that a broken config fails before anything is made from it."""
    ids = cast(Tensor, tokenizer(_PROBE, return_tensors="pt", verbose=False)["input_ids"])
    require_vocabulary(model, ids)
    logits = cast(Tensor, model(ids.to(model.device), use_cache=False).logits)
    if logits.isnan().any():
        raise ValueError("it predicts NaN for a line of text; check that its weights and config are complete")


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def _require_plain_files(folder: Path) -> None:
    """Check that each file that transformers may read in a local model folder is a regular file of bounded size.

    transformers waits for pipes, and reads devices for ever.

    Raises: ValueError naming the first one that is a pipe, device, socket or folder, a link to nothing, or too large;
        or that names weights outside the folder.
    """
    for place in (folder, folder / "additional_chat_templates"):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            _require_plain(path)
    for index in sorted(folder.glob("*.index.json")):
        found: Any = read_json_object(index, _REMEDY).get("weight_map")
        for name in set(cast("dict[str, Any]", found).values()) if isinstance(found, dict) else ():
            if not _is_own_file(name) or not name.endswith(_READ):
                wanted = "expected a file of weights in its folder"
                raise ValueError(f"{index} names the file {name!r}, {wanted}; {_REMEDY}")
    if not (config := folder / "config.json").is_file():
        return  # an adapter
    name = read_json_object(config, _REMEDY, strict=False).get("transformers_weights")  # some hold Infinity
    if name is not None and not _is_own_file(name):
        raise ValueError(
            f"{config} names the weights {name!r} (transformers_weights), expected a file of its folder; {_REMEDY}"
        )


def _is_own_file(name: object) -> bool:
    return isinstance(name, str) and os.path.basename(name) == name


def _require_plain(path: Path) -> None:
    read = path.name.endswith(_READ)
    try:
        status = path.stat()
    except OSError as error:  # also a link to itself
        if read:
            raise ValueError(f"{path} is a link that leads to no file, expected a regular file; {_REMEDY}") from error
        return
    kind = file_kind(status.st_mode)
    if kind and (read or kind != "a folder"):
        raise ValueError(f"{path} is {kind}, expected a regular file; {_REMEDY}")
    if path.name.endswith(_TEXTS) and status.st_size > _MOST_TEXT_BYTES:
        raise ValueError(f"{path} has {status.st_size} bytes, expected at most {_MOST_TEXT_BYTES}; {_REMEDY}")
