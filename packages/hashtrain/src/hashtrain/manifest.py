"""What a capture's folder holds: `manifest.json` says of what, and the size and SHA-256 of each file.

1. `begin` writes the manifest before the first file; `missing` knows what an interrupted capture of the same left.
2. Each file is followed by a small JSON file with its size and checksum, so that several processes can write.
3. `finish` moves those into the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hashtrain.atomic import write_text
from hashtrain.models import device_of
from hashtrain.untrusted import read_json_object

_NAME, _FORMAT = "manifest.json", 1
_OURS = re.compile(r"\d{5}\.(safetensors|json)|manifest\.json|\.(\d{5}\.\w+|manifest\.json)\.\w{8}")
"""Names that a capture writes, the last ones if it is killed while it does."""


class Stored(Protocol):
    """A folder of numbered files (`hashtrain.captured.Capture`)."""

    folder: Path

    def __len__(self) -> int: ...
    def file(self, context: int) -> Path:
        """Return where one of them is."""
        ...


def identity(
    model: PreTrainedModel,
    contexts: Sequence[Tensor],
    dtype: torch.dtype,
    seed: int | None = None,
    weights: str | None = None,
) -> dict[str, Any]:
    """Say of what a capture is: two of equal identity hold the same bits.

    The model counts by its weights as they are in memory, so that no name or revision need be trusted; `seed` is the
    one that drew the contexts, if any; `weights` is `weights_hash(model)`, if known.
    """
    return {
        "format": _FORMAT,
        "model": weights or weights_hash(model),
        "revision": getattr(model.config, "_commit_hash", None),
        "corpus": _hash(contexts),
        "contexts": len(contexts),
        "context": max(map(len, contexts), default=0),
        "seed": seed,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device_of(model).type,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def missing(stored: Stored, wanted: dict[str, Any]) -> list[int]:
    """Return the numbers of the files that a capture of this identity still lacks; nothing is written.

    A file counts as there if its size and the time it was written are as recorded, or else its checksum: terabytes are
    not read again at every start, and a copied or a changed file is.
    """
    manifest = _read(stored.folder / _NAME)
    if not _same(manifest, wanted):
        return list(range(len(stored)))
    return [number for number in range(len(stored)) if not _whole(stored.file(number), manifest["files"])]


def begin(stored: Stored, wanted: dict[str, Any]) -> None:
    """Make the folder ready for a capture of this identity: what a capture of another one left is removed."""
    if _same(_read(stored.folder / _NAME), wanted):
        return
    if stored.folder.is_dir():
        for path in stored.folder.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink()
    write_text(stored.folder / _NAME, json.dumps({**wanted, "files": {}}, indent=1) + "\n")


def finish(stored: Stored) -> None:
    """Gather every file's size and checksum in the manifest."""
    path = stored.folder / _NAME
    manifest = _read(path)
    # A file that was made anew has its own record beside it, which counts.
    found = {p.name: _read(p.with_suffix(".json")) or manifest["files"].get(p.name) for p in _files(stored)}
    write_text(path, json.dumps({**manifest, "files": found}, indent=1) + "\n")
    for file in _files(stored):
        file.with_suffix(".json").unlink(missing_ok=True)


def checksum(path: Path) -> dict[str, Any]:
    """Return the size in bytes, the SHA-256 and the time of writing, in nanoseconds, of a file."""
    with path.open("rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
        told = os.fstat(file.fileno())
    return {"bytes": told.st_size, "sha256": sha, "written": told.st_mtime_ns}


def _files(stored: Stored) -> list[Path]:
    return [stored.file(number) for number in range(len(stored))]


def _whole(path: Path, recorded: dict[str, Any]) -> bool:
    wanted = _read(path.with_suffix(".json")) or recorded.get(path.name)
    if not wanted or not path.is_file():
        return False
    told = path.stat()
    if (told.st_size, told.st_mtime_ns) == (wanted.get("bytes"), wanted.get("written")):
        return True
    found = checksum(path)
    return all(found[name] == wanted.get(name) for name in ("bytes", "sha256"))


def _same(manifest: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return isinstance(manifest.get("files"), dict) and {key: manifest.get(key) for key in wanted} == wanted


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON file; empty if there is none, or it is not one of ours: then what it speaks of is made anew."""
    try:
        return read_json_object(path, "capture again")
    except (FileNotFoundError, ValueError):
        return {}


def weights_hash(model: PreTrainedModel) -> str:
    """Identify a model by its config and every bit of its weights."""
    facts = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    sha = hashlib.sha256(repr(sorted(facts.items(), key=lambda item: item[0])).encode())
    for module_name, module in model.named_modules():
        with _at_hand(module):
            for name, tensor in module.state_dict().items():
                if "." not in name:  # its own; those of modules inside it come with them
                    sha.update(f"{module_name}.{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                    sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return sha.hexdigest()


def _at_hand(module: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Bring the weights of a module that accelerate keeps elsewhere."""
    if not hasattr(module, "_hf_hook"):
        return contextlib.nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module, torch.device("cpu"))


def _hash(contexts: Sequence[Tensor]) -> str:
    sha = hashlib.sha256()
    for ids in contexts:
        sha.update(len(ids).to_bytes(8, "little"))
        sha.update(ids.contiguous().numpy().tobytes())
    return sha.hexdigest()
