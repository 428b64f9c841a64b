"""Capture: run a causal LM over token contexts and store each layer's queries and keys, after RoPE, and values."""

# Configs of transformers, and some methods of torch, have no types.
# pyright: reportUnknownMemberType=false

import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations import sdpa_attention

from hashtrain.config import ModelShape
from hashtrain.data.captured import ALL, STRIDE, Kept
from hashtrain.data.captured import Capture as Capture
from hashtrain.data.offsets import places, positions
from hashtrain.device import finish as wait_for
from hashtrain.device import to_host
from hashtrain.files.atomic import save_tensors
from hashtrain.models import text_decoder

_OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "wo")
"""Names of the output projection in attention modules."""
Hook = Callable[[int, Tensor, Tensor, Tensor, float], Tensor | None]
# Our name for each attention implementation. Hugging Face looks for "sdpa" and "flash" in names: avoid them.
_NAMES = {"sdpa": "hashtrain_capture", "eager": "hashtrain_capture_eager"}
_hook: ContextVar[Hook | None] = ContextVar("hashtrain_hook", default=None)


class _Complete(Exception):
    """Every layer's queries and keys are known: what a model computes after them is not needed."""


def _capturing_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    hook, scaling = _hook.get(), kwargs.get("scaling") or query.shape[-1] ** -0.5
    if hook and (out := hook(module.layer_idx, query.detach(), key.detach(), value.detach(), scaling)) is not None:
        return out, None
    forward = cast("Callable[..., Any]", sdpa_attention.sdpa_attention_forward)
    if module.config._attn_implementation == _NAMES["eager"]:  # supports soft-capping and learned sinks, unlike SDPA
        forward = sys.modules[type(module).__module__].eager_attention_forward
    return forward(module, query, key, value, attention_mask, **kwargs)


@contextlib.contextmanager
def capturing(model: PreTrainedModel, hook: Hook) -> Generator[None]:
    """Call `hook(layer, q, k, v, scaling)` in every attention layer of every forward pass inside the block.

    q is [B, Hq, T, D] and k is [B, Hkv, T, D], after RoPE and any query or key norm, as attention multiplies them.
    v is [B, Hkv, T, Dv]. Keys and values include cached tokens, and there is no mask. If the hook returns a tensor, it
    is the layer's output, [B, T, Hq, Dv]; if it returns None, a model with "eager" attention still computes its outputs
    that way, and any other uses SDPA.
    """
    for dense in _NAMES:
        mask: Callable[..., Any] = getattr(masking_utils, f"{dense}_mask")
        AttentionInterface.register(_NAMES[dense], _capturing_attention)
        AttentionMaskInterface.register(_NAMES[dense], mask)
    config = cast(Any, text_decoder(model).config)
    before: str = config._attn_implementation or "sdpa"
    token = _hook.set(hook)
    _set_attention(model, _NAMES["eager" if before == "eager" else "sdpa"])
    try:
        yield
    finally:
        _set_attention(model, before)
        _hook.reset(token)


def observe(model: PreTrainedModel, ids: Tensor, hook: Hook, where: Tensor | None = None) -> None:
    """Run one context, ids int64 [T], without gradients, inside `capturing`.

    Args: where: each token's position, int64 [T] (`hashtrain.data.offsets`); None: from 0 on.
    """
    moved = positions(model, where)
    with torch.inference_mode(), capturing(model, hook):
        model(ids[None].to(model.device), use_cache=False, logits_to_keep=1, **moved)


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of the text decoder only; a vision tower keeps its own."""
    config, decoder = cast(Any, model.config), cast(Any, text_decoder(model).config)
    mine: list[str] = [key for key in config.sub_configs if getattr(config, key) is decoder]
    model.set_attn_implementation({mine[0]: name} if mine else name)


def capture(
    model: PreTrainedModel,
    contexts: Sequence[Tensor],
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    reach: int | None = None,
    torn: bool = False,
) -> Capture:
    """Run the model over token contexts (int64 [T] each) and store q, k and v of every layer below `folder` as `dtype`.

    Args:
        reach: contexts are spread over positions 0 to reach - 1; None: all begin at 0.
        torn: whether every second one is torn, as those of training are (`hashtrain.data.offsets`).
    """
    stored = Capture(folder, len(contexts))
    for number, ids in enumerate(contexts):
        tensors, header = run_context(model, ids, dtype, where=places(number, len(ids), reach, torn))
        save_tensors(tensors, stored.file(number), metadata=header)
    return stored


def context_key(weights: str, ids: Tensor, device: str, kept: Kept, where: Tensor) -> str:
    """Return a digest of everything that decides the bits of one context's file.

    The model is identified by its weights in memory, so no name or revision has to be trusted: `weights` is
    `weights_hash(model)`. Devices and versions of torch round differently.
    """
    versions = [torch.__version__, transformers.__version__]
    sha = hashlib.sha256(json.dumps([weights, device, kept, *versions]).encode())
    for numbers in (ids, where):
        sha.update(numbers.contiguous().numpy().tobytes())
    return sha.hexdigest()[:32]


def weights_hash(model: PreTrainedModel) -> str:
    """Identify a model by its config and every bit of its weights."""
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    sha = hashlib.sha256(repr(sorted(config.items(), key=lambda item: item[0])).encode())
    for name, tensor in model.state_dict().items():
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return sha.hexdigest()


def run_context(
    model: PreTrainedModel,
    ids: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    kept: Kept = ALL,
    where: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Run one context; return its tensors, and the file's header.

    Args:
        kept: what to keep beside the keys. The host waits for the device once, at the end.
        where: each token's position, int64 [T]; None: from 0 on.
    """
    device, tensors, header = model.device, dict[str, Tensor](), {STRIDE: str(kept.stride(len(ids)))}
    last, calls = cast(Any, text_decoder(model).config).num_hidden_layers - 1, list[int]()

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> None:
        found = {"q": q[:, :, :: kept.stride(len(ids))], "k": k, **({"v": v} if kept.values else {})}
        tensors.update({f"{name}.{layer}": to_host(x.to(dtype).contiguous()) for name, x in found.items()})
        header[f"scaling.{layer}"] = repr(scaling)
        calls.append(layer)
        if layer == last and len(calls) == len(header) - 1:  # go on in a model that attends twice in each layer
            raise _Complete

    with contextlib.suppress(_Complete):
        observe(model, ids, keep, where)
    wait_for(device)
    if missing := {*range(last + 1)} - {*calls}:
        raise ValueError(
            f"expected a model that attends through transformers' attention functions, got {type(model).__name__}: "
            f"layer {min(missing)} does not; no hasher can be trained for it"
        )
    return tensors, header


@torch.no_grad()
def output_projections(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the output projection of each attention layer, [Hq Dv, hidden], as far as it has a usual name."""
    found: dict[str, Tensor] = {}
    for module in cast("list[Any]", [*text_decoder(model).modules()]):
        layer = getattr(module, "layer_idx", None)
        project = next((x for name in _OUTPUT if (x := getattr(module, name, None)) is not None), None)
        if isinstance(layer, int) and project is not None and str(layer) not in found:
            size = getattr(project, "in_features", None) or project.weight.shape[0]  # of a Conv1D, the latter
            one = torch.eye(size, device=model.device, dtype=model.dtype)
            found[str(layer)] = project(one) - project(torch.zeros_like(one[:1]))  # without its bias
    return found


def context_bytes(shape: ModelShape, tokens: int, dtype: torch.dtype, kept: Kept = ALL) -> int:
    """Return the bytes of one context's tensors in all layers."""
    total, queries = 0, -(-tokens // kept.stride(tokens))
    for at in map(shape.at, range(shape.num_layers)):
        heads = (1 + kept.values) * tokens * at.num_kv_heads + queries * at.num_query_heads
        total += heads * at.head_dim * dtype.itemsize
    return total


def free_disk(folder: Path) -> int:
    """Return the bytes that captures below a folder, which need not exist, may take: ten elevenths of what is free."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return int(shutil.disk_usage(existing).free / 1.1)
