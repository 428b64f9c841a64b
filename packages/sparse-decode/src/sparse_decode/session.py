"""Session files: a prompt's cache on disk, so that its tokens are never computed twice.

A file in the format of safetensors: the length of a header of JSON, the header, arrays. Nothing of it is pickled.

    tokens                               int64 [B, n]
    layers.L.keys, .values, .codes       [B, H, n + room, X]; the room is zeros, and a hole in the file
    layers.L.keys, .values               of a layer with a sliding window: [B, H, up to its window, X]
    layers.L.sums.keys, ...              what the remainder has summed (`Sums`), and the number of its tokens

The header's metadata hold the digest of the model's weights, of the hasher, of all arrays, and of the header itself.
Arrays with room are mapped privately, not read: a step reads the pages that it needs, later tokens are written to pages
of memory in the room, and the file never changes. Beyond the room a layer is copied to memory.
"""

# Configs of transformers have no types.
# pyright: reportUnknownMemberType=false

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
from hashtrain import Hasher, ModelShape
from hashtrain.adapters import adapter_of
from hashtrain.data.capture import weights_hash
from hashtrain.files.atomic import replace
from hashtrain.files.untrusted import MAX_HEADER_BYTES
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from sparse_decode.caches.cache import retype
from sparse_decode.caches.growing import GrowingLayer
from sparse_decode.model import with_own_keys
from sparse_decode.modes import ordinary_tensors
from sparse_decode.select import HashSelector, Selector
from sparse_decode.step import SparseLayer

if TYPE_CHECKING:
    from sparse_decode.attach import Attachment

FORMAT, VERSION = "sparse-decode session", "1"
ROOM = 1024
"""Tokens that can be appended to a loaded session before a layer is copied to memory."""
_ALIGN = 4096  # of the arrays' start: a page
_BLANK = "0" * 64  # in the place of a digest that is not known yet
_FOREIGN = "name a file that attachment.save wrote"
_WHOLE = DynamicLayer, GrowingLayer
_KINDS = (*_WHOLE, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))  # since 5.21
_SUMS = "keys", "values", "spread", "starts"
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
          torch.int32: "I32"}  # fmt: skip
_FLOATS = "F64", "F32", "BF16", "F16"


class _Array(NamedTuple):
    """An array to write: a tensor, and for [B, H, T, X] the spare rows behind those of each head."""

    tensor: Tensor
    room: int = 0

    @property
    def shape(self) -> list[int]:
        *first, rows, width = [1, 1, *self.tensor.shape]
        return [*first, rows + self.room, width][2:]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.tensor.dtype.itemsize


class _File:
    """A session file for reading, with a header that was checked. Attributes: facts: the metadata."""

    def __init__(self, path: Path):
        self._path = path
        with path.open("rb") as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                self.refuse(f"expected a header that fits its {size} bytes, got one of {length}", _FOREIGN)
            raw, self._start = file.read(length), 8 + length
        try:
            self._held = safe_open(path, "pt")
            self.facts: dict[str, str] = self._held.metadata()
            kind, version, digest = (self.facts[name] for name in ("format", "version", "header"))
            self._names = frozenset(self._held.keys())
        except (SafetensorError, LookupError, TypeError):
            self.refuse(f'expected a header of a "{FORMAT}" and the arrays that it names, got others', _FOREIGN)
        if (kind, version) != (FORMAT, VERSION):
            self.refuse(f'expected a "{FORMAT}" of version {VERSION}, got a "{kind}" of version {version}')
        if hashlib.sha256(raw.replace(digest.encode(), _BLANK.encode(), 1)).hexdigest() != digest:
            self.refuse("the checksum of its header does not match")

    def refuse(self, reason: str, remedy: str = "delete it and save the session again") -> NoReturn:
        """Raise ValueError with the file's name."""
        raise ValueError(f"{self._path} is not a usable session file: {reason}; {remedy}")

    def verify(self) -> None:
        """Raise ValueError if any byte of an array has changed."""
        with self._path.open("rb") as file:
            file.seek(self._start)
            if hashlib.file_digest(file, "sha256").hexdigest() != self.facts.get("data"):
                self.refuse("the checksum of its arrays does not match")

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def mapped(self, name: str, kinds: Sequence[str], *shape: int | None) -> Tensor:
        """Map an array: its pages are read when used, and copied when written.

        Raises: ValueError if it is missing, or not of one of these kinds, or of another shape; None is any number.
        """
        found: Any = self._held.get_slice(name) if name in self else None
        kind, sizes = ("none", []) if found is None else (found.get_dtype(), found.get_shape())
        alike = len(sizes) == len(shape) and all(n in (None, m) for n, m in zip(shape, sizes, strict=True))
        if kind not in kinds or not alike:
            self.refuse(f"expected {name} of {' or '.join(kinds)} {[*shape]}, got {kind} {sizes}")
        return self._held.get_tensor(name)

    def read(self, name: str, device: torch.device, kind: str, *shape: int | None) -> Tensor:
        """Read an array to a device."""
        return self.mapped(name, [kind], *shape).to(device, copy=True)


# ---- Saving ----------------------------------------------------------------------------------------------------------


def save(attachment: "Attachment", cache: Any, path: str | os.PathLike[str], tokens: Tensor | Sequence[int]) -> None:
    """Write a session file: `Attachment.save`."""
    _require_savable(attachment, cache)
    ids, n, batch = _as_ids(tokens), cache.get_seq_length(), len(cache.layers[0].keys)
    if ids.shape != (batch, n):
        raise ValueError(
            f"expected the tokens that the cache holds, [{batch}, {n}], got {[*ids.shape]}; leave out those that the "
            "model has not read yet"
        )
    facts = {"format": FORMAT, "version": VERSION, **_bound(attachment)}
    attachment.prepare(cache)
    room, arrays = -(-(n + ROOM) // 64) * 64 - n, {"tokens": _Array(ids)}
    for index, layer in enumerate(cache.layers):
        if layer.is_initialized and layer.keys is not None:  # others use another layer's keys
            found = _of_layer(layer, attachment._layers.get(index), n, room)
            arrays |= {f"layers.{index}.{name}": array for name, array in found.items()}
    ordered = dict(sorted(arrays.items(), key=lambda item: (not item[1].room, -item[1].tensor.dtype.itemsize)))
    replace(Path(path), lambda temporary: _write(temporary, ordered, facts))


def _of_layer(layer: Any, sparse: SparseLayer | None, n: int, room: int) -> dict[str, _Array]:
    """Return the arrays of a layer of n tokens, by the ends of their names."""
    keys, values = layer.keys, layer.values
    room = room if type(layer) in _WHOLE else 0
    found = {"keys": _Array(keys, room), "values": _Array(values, room)}
    if isinstance(layer, GrowingLayer):
        layer.wait()
    if sparse is not None and isinstance(layer, GrowingLayer) and layer.encoder is not None:
        codes, sums = layer.codes, layer.sums
        if sparse.remainder is not None and not sums.length:  # no step has needed them yet
            sums.advance(keys, values, None, n, codes.device)
            sums.ready = False  # the next step looks whether there is padding
        found["codes"] = _Array(codes, room)
        found["sums.length"] = _Array(torch.tensor([sums.length], dtype=torch.int64))
        found |= {f"sums.{name}": _Array(x) for name in _SUMS if (x := getattr(sums, name)) is not None}
    return found


def _require_savable(attachment: "Attachment", cache: Any) -> None:
    """Raise ValueError if a cache is empty, or of a kind that a file cannot hold."""
    remedy = "use DynamicCache(config=model.config)"
    if type(cache) is not DynamicCache:
        raise ValueError(f"a session needs a DynamicCache, got {type(cache).__name__}; {remedy}")
    made = DynamicCache(config=attachment.model.config).is_sliding
    for index, layer in enumerate(cache.layers):
        known = type(layer) in _KINDS and index < len(made)
        if not known or cache.is_sliding[index] != made[index]:
            raise ValueError(f"a session cannot hold a {type(layer).__name__} in layer {index}; {remedy}")
    if not cache.get_seq_length():
        raise ValueError("a session needs a cache with tokens, got an empty one; run the prompt first")


def _write(path: Path, arrays: dict[str, _Array], facts: dict[str, str]) -> None:
    """Write the arrays, then the header in front of them, which holds their digest."""
    facts, digest = facts | {"data": _BLANK, "header": _BLANK}, hashlib.sha256()
    with path.open("wb") as file:
        file.seek(len(_header(arrays, facts)))
        for array in arrays.values():
            hole = bytes(array.room * array.tensor[0, 0, 0].nbytes) if array.room else b""
            for rows in array.tensor.flatten(0, 1) if array.room else [array.tensor]:
                octets = rows.cpu().contiguous().view(torch.uint8).numpy().data
                file.write(octets)
                file.seek(len(hole), os.SEEK_CUR)
                digest.update(octets)
                digest.update(hole)
        header = _header(arrays, facts | {"data": digest.hexdigest()})
        file.seek(0)
        file.write(header.replace(_BLANK.encode(), hashlib.sha256(header[8:]).hexdigest().encode(), 1))


def _header(arrays: dict[str, _Array], facts: dict[str, str]) -> bytes:
    entries, at = dict[str, Any](__metadata__=facts), 0
    for name, array in arrays.items():
        end = at + array.nbytes
        entries[name] = {"dtype": _NAMES[array.tensor.dtype], "shape": array.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


# ---- Loading ---------------------------------------------------------------------------------------------------------


def load(
    attachment: "Attachment", path: str | os.PathLike[str], tokens: Tensor | Sequence[int] | None, verify: bool
) -> tuple[DynamicCache, Tensor]:
    """Read a session file: `Attachment.load`."""
    path = Path(path)
    if not path.is_file():
        got = "another kind of file" if path.exists() else "none"
        raise ValueError(f"expected a session file at {path}, got {got}; write one with attachment.save")
    with ordinary_tensors():
        file = _File(path)
        _require_bound(attachment, file)
        if verify:
            file.verify()
        ids = file.read("tokens", torch.device("cpu"), "I64", None, None)
        n = ids.shape[1]
        kept = n if tokens is None else _common(file, ids, _as_ids(tokens))
        cache = DynamicCache(config=attachment.model.config)
        own = attachment.model.device
        placed = {found.layer: found.device or own for found in with_own_keys(attachment.model)}
        for index, layer in enumerate(cache.layers):
            if index in placed or f"layers.{index}.keys" in file:
                _fill(attachment, file, index, layer, (len(ids), n, kept), placed.get(index, own))
    return cache, ids[:, :kept].to(own)


def _require_bound(attachment: "Attachment", file: _File) -> None:
    """Raise ValueError if a file is of another model or hasher."""
    remedy = "load it with what saved it, or delete it"
    for name, own in _bound(attachment).items():
        if own and (stored := file.facts.get(name, "")) != own:
            file.refuse(f"expected one of this {name} ({own[:12]}), got {stored[:12] or 'none'}", remedy)
    for index, sparse in attachment._layers.items():
        if sparse.selector.needs_codes and f"layers.{index}.codes" not in file:
            file.refuse(f"expected codes of layer {index}, got none", "attach with the dense_layers that saved it")


def _common(file: _File, stored: Tensor, ids: Tensor) -> int:
    """Return how many of the stored tokens [B, n] begin the prompt ids [B, T], of which at least one is to be run."""
    if len(ids) != len(stored):
        file.refuse(f"expected a prompt of {len(stored)} sequences, got {len(ids)}", "pass the same batch")
    if (most := min(stored.shape[1], ids.shape[1] - 1)) < 1:
        raise ValueError(f"expected a prompt of at least 2 tokens, got {ids.shape[1]}: the last one is run, not loaded")
    alike = (stored[:, :most] == ids[:, :most]).all(0)
    kept = int(alike.cumprod(0).sum())
    if not kept:
        file.refuse("expected tokens that begin this prompt, got others from the first on", "name another file")
    return kept


def _fill(
    attachment: "Attachment", file: _File, index: int, layer: Any, tokens: tuple[int, int, int], device: torch.device
) -> None:
    """Fill a layer of a new cache. Args: tokens: sequences, how many tokens of each are there, and how many to take."""
    at, sparse, (batch, n, kept) = f"layers.{index}.", attachment._layers.get(index), tokens
    sliding = isinstance(layer, DynamicSlidingWindowLayer)
    heads = None if sparse is None else ModelShape.of(attachment._config).at(index)  # other layers may have other heads
    size = (None, None) if heads is None else (heads.num_kv_heads, heads.head_dim)
    keys = file.mapped(at + "keys", _FLOATS, batch, size[0], None, size[1])
    values = file.mapped(at + "values", [_NAMES[keys.dtype]], *keys.shape[:3], None)
    if (rows := keys.shape[2]) != n and (rows > n) == sliding:
        file.refuse(f"expected {n} tokens in layer {index}, got room for {rows}")
    if sliding:
        keys, values = keys.to(device, copy=True), values.to(device, copy=True)
        if kept < n and keys.shape[2] < n:
            remedy = "begin the prompt with all of them, and add a token"
            file.refuse(f"expected a prompt with its {n} tokens, got {kept}: sliding layers cannot be cut", remedy)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys[:, :, :kept], values[:, :, :kept]
        layer.cumulative_length = kept
        return
    if sparse is None or not sparse.selector.needs_codes:
        return retype(layer, attachment._owned).hold(keys.to(device), values.to(device), kept, device)
    own, words = sparse.encoder.code_shape(keys)
    codes = file.mapped(at + "codes", ["I32"], batch, own, rows, words)
    on_host = attachment._on_host
    held = retype(layer, attachment._owned, sparse.encoder, on_host)
    if on_host and device.type == "cuda":
        keys, values = keys.pin_memory(), values.pin_memory()
    elif not on_host:
        keys, values = keys.to(device), values.to(device)
    if not 0 <= (length := int(file.mapped(at + "sums.length", ["I64"], 1))) <= n:
        file.refuse(f"expected sums of at most {n} tokens in layer {index}, got {length}")
    if length:
        (*of, _, width), deep = keys.shape, values.shape[3]
        held.sums.restore(
            file.read(at + "sums.keys", device, "F64", *of, width),
            file.read(at + "sums.values", device, "F64", *of, deep),
            file.read(at + "sums.spread", device, "F32", *of, width, deep),
            file.read(at + "sums.starts", device, "I64", batch) if at + "sums.starts" in file else None,
            length,
        )
        held.sums.drop(keys[:, :, :n], values[:, :, :n], kept)
    held._codes.hold(codes.to(device), kept)
    held.hold(keys, values, kept, device)


# ---- Binding ---------------------------------------------------------------------------------------------------------


def _bound(attachment: "Attachment") -> dict[str, str]:
    """Return what keys and codes depend on beside the tokens, by its name; "" for what does not matter here."""
    model = _model_digest(attachment.model)
    return {"model": model, "hasher": _hasher_digest(attachment), "kind of prompts": attachment.prompt}


def _as_ids(tokens: Tensor | Sequence[int]) -> Tensor:
    """Return tokens as int64 [B, T] on the CPU."""
    ids = torch.as_tensor(tokens).cpu()
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.is_floating_point():
        raise ValueError(f"tokens must be integers [T] or [B, T], got {ids.dtype} {tuple(ids.shape)}")
    return ids.long()


def _model_digest(model: PreTrainedModel) -> str:
    """Identify a model by its config, its weights, and the adapters that are on."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("a session needs the model's weights in memory, got some that are loaded when called")
    return hashlib.sha256(f"{weights_hash(model)} {adapter_of(model)}".encode()).hexdigest()


def _hasher_digest(attachment: "Attachment") -> str:
    """Identify the hasher of an attachment by its config and weights; "" if it stores no codes."""
    sparse = next(iter(attachment._layers.values()), None)
    selector: Selector | None = None if sparse is None else sparse.selector
    if selector is None or not selector.needs_codes:
        return ""
    hasher: Any = selector.hasher if isinstance(selector, HashSelector) else selector
    if not isinstance(hasher, Hasher):
        raise ValueError(f"a session needs a hashtrain.Hasher, whose weights identify it, got {type(hasher).__name__}")
    per_query_head = cast(Any, selector).per_query_head
    digest = hashlib.sha256(json.dumps([asdict(hasher.config), per_query_head], sort_keys=True).encode())
    for name, tensor in sorted(hasher.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
