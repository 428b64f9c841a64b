"""Load a causal LM and its tokenizer from a folder or the hub, or say in a sentence why not."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in its own dtype, ready for inference.

    Args:
        name: a local folder, or a hub id.
    Raises: ValueError if there is no loadable model of that name.
    """
    if ("/" in name or name.startswith(".")) and not _is_hub_id(name) and not Path(name).is_dir():
        raise ValueError(f"model folder not found: expected a Hugging Face model at {name}")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"{name} holds no config.json: expected a folder written by save_pretrained")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} are truncated or damaged ({error}); fetch them again") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        local = "" if Path(name).is_dir() else " (there is no folder of that name)"
        raise ValueError(f"cannot load the model {name}{local}: {first}") from error
    return model.eval().requires_grad_(False), tokenizer


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")
