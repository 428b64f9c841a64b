"""q, k and v out: run a causal LM over token contexts and store each layer's post-RoPE queries, keys, and values.

One safetensors file per context, written atomically, so that a killed run leaves only whole files, which the next one
keeps (`hashtrain.manifest`). Reading is lazy: a layer's training maps just that layer's bytes.
"""

# Configs of transformers, and some methods of torch, have no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations import sdpa_attention

from hashtrain.atomic import save_tensors, write_text
from hashtrain.config import ModelShape
from hashtrain.manifest import begin, checksum, finish, identity, missing
from hashtrain.models import device_of, text_decoder
from hashtrain.untrusted import open_tensors

Sink = Callable[[int, Tensor, Tensor, Tensor, float], None]
# By the attention that computes the output. Hugging Face looks for "sdpa" and "flash" inside names: keep them out.
_NAMES = {"sdpa": "hashtrain_capture", "eager": "hashtrain_capture_eager"}
_sink: ContextVar[Sink | None] = ContextVar("hashtrain_sink", default=None)
Attention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
_instead: ContextVar[Attention | None] = ContextVar("hashtrain_instead", default=None)


def _capturing_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    sink, instead = _sink.get(), _instead.get()
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    if sink is not None:
        sink(module.layer_idx, query.detach(), key.detach(), value.detach(), scaling)
    if instead is not None:
        return instead(module.layer_idx, query, key, value, scaling), None
    forward = cast("Callable[..., Any]", sdpa_attention.sdpa_attention_forward)
    if module.config._attn_implementation == _NAMES["eager"]:  # knows what SDPA does not: soft-capping, learned sinks
        forward = sys.modules[type(module).__module__].eager_attention_forward
    return forward(module, query, key, value, attention_mask, **kwargs)


@contextlib.contextmanager
def capturing(model: PreTrainedModel, sink: Sink) -> Generator[None]:
    """Call `sink(layer, q, k, v, scaling)` for every attention layer of every forward pass inside the block.

    q is [B, Hq, T, D], k is [B, Hkv, T, D], after RoPE and after any query or key norm: what attention multiplies.
    v is [B, Hkv, T, Dv].
    A model with "eager" attention keeps computing its outputs with it, any other with SDPA.
    """
    token = _sink.set(sink)
    try:
        with _our_attention(model):
            yield
    finally:
        _sink.reset(token)


@contextlib.contextmanager
def replacing(model: PreTrainedModel, attend: Attention) -> Generator[None]:
    """Compute the output [B, T, Hq, Dv] of every attention layer inside the block by `attend(layer, q, k, v, scaling)`.

    q, k and v are what attention is given, a cache's tokens included; there is no mask: `attend` knows who sees what.
    """
    token = _instead.set(attend)
    try:
        with _our_attention(model):
            yield
    finally:
        _instead.reset(token)


@contextlib.contextmanager
def _our_attention(model: PreTrainedModel) -> Generator[None]:
    for dense in _NAMES:
        mask: Callable[..., Any] = getattr(masking_utils, f"{dense}_mask")
        AttentionInterface.register(_NAMES[dense], _capturing_attention)
        AttentionMaskInterface.register(_NAMES[dense], mask)
    config = cast(Any, text_decoder(model).config)
    before: str = config._attn_implementation or "sdpa"
    _set_attention(model, _NAMES["eager" if before == "eager" else "sdpa"])
    try:
        yield
    finally:
        _set_attention(model, before)


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of the text decoder alone: a vision tower keeps its own."""
    config, decoder = cast(Any, model.config), cast(Any, text_decoder(model).config)
    mine: list[str] = [key for key in config.sub_configs if getattr(config, key) is decoder]
    model.set_attn_implementation({mine[0]: name} if mine else name)


class Capture:
    """Stored queries, keys and values of some contexts; `read(context, layer)` gives that layer's (q, k, scaling)."""

    def __init__(self, folder: Path, count: int):
        self.folder: Path = folder
        self.count: int = count

    def __len__(self) -> int:
        return self.count

    def file(self, context: int) -> Path:
        """Return where one context is stored."""
        return self.folder / f"{context:05d}.safetensors"

    def read(self, context: int, layer: int) -> tuple[Tensor, Tensor, float]:
        """Read q [1, Hq, T, D], k [1, Hkv, T, D] in the stored dtype, and the logits' scaling.

        Raises: ValueError naming the file if it holds none; FileNotFoundError if it is not there.
        """
        path, remedy = self.file(context), "delete it and capture again"
        with open_tensors(path, remedy) as file:
            scaling = cast("dict[str, str]", file.metadata() or {})[f"scaling.{layer}"]
            q, k = file.get_tensor(f"q.{layer}"), file.get_tensor(f"k.{layer}")
        alike = q.ndim == k.ndim == 4 and (q.dtype, q.shape[0], q.shape[2:]) == (k.dtype, 1, k.shape[2:])
        if not alike or not q.is_floating_point() or q.shape[1] % max(1, k.shape[1]) or not k.numel():
            raise ValueError(
                f"{path} holds no queries [1, Hq, T, D] and keys [1, Hkv, T, D] of layer {layer}, got {q.dtype} "
                f"{tuple(q.shape)} and {k.dtype} {tuple(k.shape)}; {remedy}"
            )
        return q, k, _scaling(path, scaling, remedy)

    def values(self, context: int, layer: int) -> Tensor:
        """Read v [1, Hkv, T, Dv] in the stored dtype. Raises: as `read` does."""
        path, remedy = self.file(context), "delete it and capture again"
        with open_tensors(path, remedy) as file:
            v, k = file.get_tensor(f"v.{layer}"), file.get_slice(f"k.{layer}").get_shape()
        if v.ndim != 4 or list(v.shape[:3]) != k[:3] or not v.is_floating_point():
            raise ValueError(
                f"{path} holds no values [1, Hkv, T, Dv] of layer {layer}, got {v.dtype} {tuple(v.shape)}; {remedy}"
            )
        return v


def _scaling(path: Path, text: str, remedy: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{path} must hold a finite number as the logits' scaling, got {text!r}; {remedy}")
    return value


def capture(
    model: PreTrainedModel,
    contexts: Sequence[Tensor],
    folder: Path,
    on_context: Callable[[], None] = lambda: None,
    dtype: torch.dtype = torch.bfloat16,
) -> Capture:
    """Run the model over token contexts (int64 [T] each) and store q, k and v of every layer below `folder` as `dtype`.

    What an interrupted capture of the same model and contexts left there is kept, anything else replaced.

    Raises: OSError before anything is written if the disk cannot hold it.
    """
    stored = Capture(folder, len(contexts))
    what = identity(model, contexts, dtype)
    lacking = missing(stored, what)
    require_disk(folder, capture_bytes(model, [contexts[number] for number in lacking], dtype))
    begin(stored, what)
    for number in range(len(contexts)):
        if number in lacking:
            capture_one(model, contexts[number], stored.file(number), dtype)
        on_context()
    finish(stored)
    return stored


def capture_one(model: PreTrainedModel, ids: Tensor, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Store q, k and v of one context, int64 [T], and then its size and checksum beside it."""
    tensors, scalings = run_context(model, ids, dtype)
    save_tensors(tensors, path, metadata=scalings)
    write_text(path.with_suffix(".json"), json.dumps(checksum(path)))


def run_context(
    model: PreTrainedModel, ids: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Run one context; return its tensors and scalings by their names in the file."""
    tensors: dict[str, Tensor] = {}
    scalings: dict[str, str] = {}

    def sink(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            tensors[f"{name}.{layer}"] = x.to("cpu", dtype).contiguous()
        scalings[f"scaling.{layer}"] = repr(scaling)

    with torch.inference_mode(), capturing(model, sink):
        model(ids[None].to(device_of(model)), use_cache=False, logits_to_keep=1)
    return tensors, scalings


def capture_bytes(model: PreTrainedModel, contexts: Sequence[Tensor], dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes that `capture` will write."""
    shape = ModelShape.of(model.config)
    layers = [shape.at(layer) for layer in range(shape.num_layers)]
    per_token = sum((at.num_query_heads + 2 * at.num_kv_heads) * at.head_dim for at in layers)
    return sum(len(ids) for ids in contexts) * per_token * dtype.itemsize


def require_disk(folder: Path, needed: int, remedy: str = "") -> None:
    """Raise OSError if the file system of `folder` lacks `needed` bytes and a tenth on top.

    Args:
        remedy: what else would help, to end the sentence with.
    """
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed * 1.1:
        raise OSError(
            f"not enough free disk at {folder}: expected {needed * 1.1 / 1e9:.2f} GB, got {free / 1e9:.2f} GB; "
            f"free some, or use fewer or shorter contexts{remedy}"
        )
