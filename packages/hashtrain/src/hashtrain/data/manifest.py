"""The manifest of a capture's folder: `manifest.json` identifies the capture and lists each file's size and SHA-256.

1. `begin` writes the manifest before the first file; `missing` finds what an interrupted capture still lacks.
2. Each file is followed by a small JSON file with its size and checksum, so that several processes can write.
3. `finish` moves those into the manifest.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hashtrain.data.captured import Capture
from hashtrain.files.atomic import write_text
from hashtrain.files.untrusted import read_json_object
from hashtrain.models import device_of

_NAME, _FORMAT = "manifest.json", 1
_VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}
_OURS = re.compile(r"\d{5}\.(safetensors|json)|manifest\.json|\.(\d{5}\.\w+|manifest\.json)\.\w{8}")
"""Names of files that a capture writes, including temporary files left by a killed process."""


def identity(
    model: PreTrainedModel,
    contexts: Sequence[Tensor],
    dtype: torch.dtype,
    seed: int | None = None,
    weights: str | None = None,
    reach: int | None = None,
) -> dict[str, Any]:
    """Return the identity of a capture: two captures with equal identity hold the same bits.

    The model is identified by its weights in memory, so no name or revision has to be trusted. `seed` is the one that
    drew the contexts, if any; `weights` is `weights_hash(model)`, if known; `reach` decides the contexts' positions.
    """
    sha = hashlib.sha256()
    for ids in contexts:
        sha.update(len(ids).to_bytes(8, "little"))
        sha.update(ids.contiguous().numpy().tobytes())
    return {
        "format": _FORMAT,
        "model": weights or weights_hash(model),
        "revision": getattr(model.config, "_commit_hash", None),
        "corpus": sha.hexdigest(),
        "contexts": len(contexts),
        "context": max(map(len, contexts), default=0),
        "seed": seed,
        "reach": reach,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device_of(model).type,
        "versions": _VERSIONS,
    }


def missing(stored: Capture, wanted: dict[str, Any]) -> list[int]:
    """Return the numbers of the files that a capture of this identity still lacks; nothing is written.

    A file counts as complete if its size and modification time match the record, or else its checksum does. So
    terabytes are not read again at every start, but copied or changed files are.
    """
    manifest = _read(stored.folder / _NAME)
    if not _same(manifest, wanted):
        return list(range(len(stored)))
    return [number for number in range(len(stored)) if not _whole(stored.file(number), manifest["files"])]


def begin(stored: Capture, wanted: dict[str, Any]) -> None:
    """Prepare the folder for a capture of this identity: files of any other capture are removed."""
    if _same(_read(stored.folder / _NAME), wanted):
        return
    if stored.folder.is_dir():
        for path in stored.folder.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink()
    write_text(stored.folder / _NAME, json.dumps({**wanted, "files": {}}, indent=1) + "\n")


def finish(stored: Capture) -> None:
    """Collect every file's size and checksum in the manifest."""
    path, files = stored.folder / _NAME, [stored.file(number) for number in range(len(stored))]
    manifest = _read(path)
    # A recaptured file has its own record beside it, which takes precedence.
    found = {p.name: _read(p.with_suffix(".json")) or manifest["files"].get(p.name) for p in files}
    write_text(path, json.dumps({**manifest, "files": found}, indent=1) + "\n")
    for file in files:
        file.with_suffix(".json").unlink(missing_ok=True)


def checksum(path: Path) -> dict[str, Any]:
    """Return a file's size in bytes, its SHA-256 and its modification time in nanoseconds."""
    with path.open("rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
        stat = os.fstat(file.fileno())
    return {"bytes": stat.st_size, "sha256": sha, "written": stat.st_mtime_ns}


def _whole(path: Path, recorded: dict[str, Any]) -> bool:
    wanted = _read(path.with_suffix(".json")) or recorded.get(path.name)
    if not wanted or not path.is_file():
        return False
    stat = path.stat()
    if (stat.st_size, stat.st_mtime_ns) == (wanted.get("bytes"), wanted.get("written")):
        return True
    found = checksum(path)
    return all(found[name] == wanted.get(name) for name in ("bytes", "sha256"))


def _same(manifest: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return isinstance(manifest.get("files"), dict) and {key: manifest.get(key) for key in wanted} == wanted


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object; return {} if it is missing or malformed, so that what it describes is captured again."""
    try:
        return read_json_object(path, "capture again")
    except (FileNotFoundError, ValueError):
        return {}


def weights_record(name: str, model: PreTrainedModel) -> dict[str, Any]:
    """Identify a model's weights without reading them: by the sizes and modification times of the files in the folder
    `name`, or by the revision of the hub id `name`; {} if there is neither."""
    folder, revision = Path(name), getattr(model.config, "_commit_hash", None)
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    if not files and revision is None:
        return {}
    stats = {path.name: path.stat() for path in files}
    return {
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "model": str(folder.absolute()) if files else [name, revision],
        "dtype": str(next(model.parameters()).dtype),
        "versions": _VERSIONS,
    }


def known_weights(path: Path, record: dict[str, Any]) -> str | None:
    """Return the `weights_hash` that an earlier run has stored with this record; None if there is none."""
    stored = _read(path)
    return stored.get("hash") if record and stored.get("record") == record else None


def weights_hash(model: PreTrainedModel) -> str:
    """Identify a model by its config and every bit of its weights."""
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    sha = hashlib.sha256(repr(sorted(config.items(), key=lambda item: item[0])).encode())
    for module_name, module in model.named_modules():
        with _on_host(module):
            for name, tensor in module.state_dict().items():
                if "." not in name:  # the module's own tensors; those of inner modules come with them
                    sha.update(f"{module_name}.{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                    sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return sha.hexdigest()


def _on_host(module: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Bring to the host the weights of a module that accelerate has offloaded."""
    if not hasattr(module, "_hf_hook"):
        return contextlib.nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module, torch.device("cpu"))
