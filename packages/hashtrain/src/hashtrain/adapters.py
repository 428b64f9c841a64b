"""LoRA adapters in peft's folders: merged into their base model when one is loaded, recorded in what is made from it.

Everything in a folder is data: its weights are safetensors, and settings that would import or download are refused.
"""

# peft is an extra, and its models have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hashtrain.files.untrusted import inside, open_tensors, read_json_object
from hashtrain.usage import require_package

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_REMEDY = "save the adapter again"
_MOST_RANK = 1 << 14
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Ways in which an adapter's training may have started; others change the base model's weights too."""
NONE = "none, unless it was merged into its weights before"
"""What a model has in which no adapter is seen."""
_MERGED = "_spotlight_adapter"
_PREFIX = "base_model.model."


def is_adapter(name: str) -> bool:
    """Whether a --model is the folder of an adapter."""
    return os.path.isfile(Path(name) / CONFIG)  # unlike Path's own methods, it takes names of any length


def base_of(folder: str) -> str:
    """Return the base model that an adapter's folder names: a folder, by itself or beside the adapter, or a hub id.

    Raises: ValueError if the folder is not that of a LoRA adapter in safetensors, or asks for more than its weights.
    """
    place, found = Path(folder), _config_of(folder)
    if not (place / WEIGHTS).is_file():
        raise ValueError(f"{folder} holds no {WEIGHTS}: expected weights in safetensors, never pickles; {_REMEDY}")
    base = found.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{place / CONFIG} names no base_model_name_or_path, got {base!r}; {_REMEDY}")
    beside = place.resolve().parent / Path(base).name
    base = str(beside) if not os.path.isdir(base) and os.path.isdir(beside) else base
    if is_adapter(base):
        raise ValueError(f"the adapter {folder} must name a model as its base, got another adapter, {base}")
    return base


def _config_of(folder: str) -> dict[str, Any]:
    """Read the settings of an adapter. Raises: ValueError as `base_of` does."""
    path = Path(folder) / CONFIG
    found = read_json_object(inside(path), _REMEDY)
    start, ranks = found.get("init_lora_weights"), found.get("rank_pattern") or {}
    if found.get("peft_type") != "LORA" or found.get("megatron_config") or start not in _STARTS:
        got = f"{found.get('peft_type')!r} with start {start!r}"
        raise ValueError(f"{folder} must be a plain LoRA adapter, got {got}; merge it into its model with peft")
    for rank in (found.get("r"), *(cast("dict[str, Any]", ranks).values() if isinstance(ranks, dict) else [ranks])):
        if type(rank) is not int or not 1 <= rank <= _MOST_RANK:
            raise ValueError(f"{path} must have ranks of 1 to {_MOST_RANK}, got {rank!r}; {_REMEDY}")
    return found


def tokenizer_of(name: str) -> str:
    """Return the folder or hub id with the tokenizer of a --model: for an adapter without one, its base model's."""
    return base_of(name) if is_adapter(name) and not (Path(name) / "tokenizer_config.json").is_file() else name


def merged(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """Return a base model with an adapter's weights added to its own; `adapter_of` then knows the adapter.

    Raises: ValueError if peft is not installed, or the file lacks weights of the adapter or has others.
    """
    require_package("peft", f"the adapter {folder}", "peft")
    import peft

    path = Path(folder) / WEIGHTS
    with warnings.catch_warnings(), open_tensors(inside(path), _REMEDY) as file:
        warnings.simplefilter("ignore")  # of missing weights, which are an error below, and of peft's own calls
        config = peft.PeftConfig.from_peft_type(**{**_config_of(folder), "init_lora_weights": True})
        adapted: Any = peft.PeftModel(model, config)
        wanted = set(peft.get_peft_model_state_dict(adapted))
        if other := sorted(wanted ^ set(file.keys())):
            what = "lacks" if other[0] in wanted else "also has"
            raise ValueError(f"{path} {what} {other[0]}, expected {len(wanted)} tensors of the adapter; {_REMEDY}")
        peft.set_peft_model_state_dict(adapted, {name: file.get_tensor(name) for name in wanted})
        digest = adapter_of(adapted)
        plain = cast(PreTrainedModel, adapted.merge_and_unload(safe_merge=True))
    setattr(plain, _MERGED, digest)
    return plain


def adapter_of(model: Any) -> str:
    """Return a digest of peft's weights that are active in a model, or merged into it by `merged`; "" if none are."""
    sha, found = hashlib.sha256(), getattr(model, _MERGED, "")
    for name, module in () if found else sorted(model.named_modules()):
        if not (parts := getattr(module, "adapter_layer_names", ())) or module.disable_adapters:
            continue
        of = [(own, x) for own, x in sorted(module.named_parameters()) if own.startswith(("lora_", *parts))]
        for active in module.active_adapters:
            if not (on := [(own, x) for own, x in of if active in own.split(".")]):
                continue
            sha.update(f"{name.removeprefix(_PREFIX)} {getattr(module, 'scaling', {}).get(active, 1.0)}".encode())
            for own, weight in on:
                sha.update(f"{own.replace(f'.{active}', '')} {tuple(weight.shape)}".encode())
                sha.update(weight.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
            found = sha.hexdigest()[:12]
    return found


def other_adapter(hasher: Any, model: Any) -> str | None:
    """Say in a sentence that a hasher was made for a model with another adapter, or None if it was not.

    Hashers that do not depend on a model, and those from before adapters were recorded, are never told apart.
    """
    made: str | None = getattr(getattr(hasher, "config", hasher), "adapter", None)
    if made is None or made == (found := adapter_of(model)):
        return None
    return mismatch(made, f"the adapter {found}" if found else NONE)


def mismatch(made: str, got: str) -> str:
    """Say in a sentence that a hasher was made with one adapter, or none (""), and that a model has another."""
    said = f"the adapter {made}" if made else "no adapter"
    return f"the hasher was made for a model with {said}, this one has {got}: it may find less; make one for this model"
