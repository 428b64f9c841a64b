"""Load a causal LM and its tokenizer from a folder or the hub, or say in a sentence why not."""

# Configs of transformers, and some methods of torch, have no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def load_model(
    name: str, dtype: torch.dtype | None = None, device: str | None = None, memory: float | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, ready for inference.

    Args:
        name: a local folder, or a hub id.
        dtype: of its weights; None keeps their own.
        device: where it runs; None is the CPU.
        memory: keep at most so many GB of weights on the device; the other layers wait in host memory, or where
            the device is the CPU in their files, and are brought in one at a time as they are run (accelerate's work).
    Raises: ValueError if there is no loadable model of that name, it does not fit, or accelerate is missing.
    """
    placed = {} if memory is None else _placement(device or "cpu", memory)
    if ("/" in name or name.startswith(".")) and not _is_hub_id(name) and not Path(name).is_dir():
        raise ValueError(f"model folder not found: expected a Hugging Face model at {name}")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"{name} holds no config.json: expected a folder written by save_pretrained")
    try:
        tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(name))
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto", **placed)
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} are truncated or damaged ({error}); fetch them again") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        local = "" if Path(name).is_dir() else " (there is no folder of that name)"
        raise ValueError(f"cannot load the model {name}{local}: {first}") from error
    model = model.eval().requires_grad_(False)
    if device is None or memory is not None:
        return model, tokenizer
    try:
        return cast(Any, model).to(device), tokenizer
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{name} does not fit on {device}: {error}; use --device cpu") from error


def device_of(model: PreTrainedModel) -> torch.device:
    """Return where a model runs, which for one that accelerate has spread is not where its weights are."""
    device = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return model.device if device is None else torch.device(device)


def _placement(device: str, memory: float) -> dict[str, Any]:
    if importlib.util.find_spec("accelerate") is None:
        raise ValueError(
            "a limit on the model's memory needs the package accelerate, not installed here: in the checkout "
            "`uv pip install './packages/hashtrain[offload]'`"
        )
    most = f"{int(memory * 1000)}MB"
    if device == "cpu":
        return {"device_map": "auto", "max_memory": {"cpu": most}}
    number = torch.device(device).index or 0
    return {"device_map": "auto", "max_memory": {number: most, "cpu": "100000GB"}}


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")
