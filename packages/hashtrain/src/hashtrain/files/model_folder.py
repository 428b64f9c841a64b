"""Check the files of a model's folder before transformers opens one: it waits for pipes and reads devices for ever."""

import os
import stat
from pathlib import Path
from typing import Any, cast

from hashtrain.files.untrusted import read_json_object

MOST_TEXT_BYTES = 1 << 28
"""Largest file that is read whole and parsed; the largest known tokenizers have 40 MB."""
_TEXTS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
_READ = (*_TEXTS, ".safetensors", ".bin")
_BELOW = ("", "additional_chat_templates")
_INDICES = "*.index.json"
_REMEDY = "fetch the model again"


def require_plain_files(folder: Path) -> None:
    """Check that every file that transformers may read in a local model folder is a regular file of bounded size.

    Raises: ValueError naming the first one that is a pipe, device, socket or folder, a link to nothing, or too large;
        or an index of weights that names a file elsewhere.
    """
    for below in _BELOW:
        place = folder / below
        if place.is_dir():
            for path in sorted(place.iterdir()):
                _require_plain(path)
    for index in sorted(folder.glob(_INDICES)):
        _require_names(index)
    if (folder / "config.json").is_file():
        _require_own_weights(folder / "config.json")


def _require_plain(path: Path) -> None:
    read = path.name.endswith(_READ)
    try:
        status = path.stat()
    except OSError as error:  # also a link to itself
        if read:
            raise ValueError(f"{path} is a link that leads to no file, expected a regular file; {_REMEDY}") from error
        return
    kind = _kind(status.st_mode)
    if kind and (read or kind != "a folder"):
        raise ValueError(f"{path} is {kind}, expected a regular file; {_REMEDY}")
    if path.name.endswith(_TEXTS) and status.st_size > MOST_TEXT_BYTES:
        raise ValueError(f"{path} has {status.st_size} bytes, expected at most {MOST_TEXT_BYTES}; {_REMEDY}")


def _kind(mode: int) -> str:
    """Name what is not a regular file; "" for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def _require_own_weights(config: Path) -> None:
    """Reject a config that names weights outside its folder. Raises: ValueError."""
    name: Any = read_json_object(config, _REMEDY).get("transformers_weights")
    if name is not None and (not isinstance(name, str) or os.path.basename(name) != name):
        raise ValueError(
            f"{config} names the weights {name!r} (transformers_weights), expected a file of its folder; {_REMEDY}"
        )


def _require_names(index: Path) -> None:
    """Reject an index of weights that names a file outside its folder. Raises: ValueError."""
    found: Any = read_json_object(index, _REMEDY).get("weight_map")
    files = set(cast("dict[str, object]", found).values()) if isinstance(found, dict) else set()
    for name in files:
        if not isinstance(name, str) or os.path.basename(name) != name or not name.endswith(_READ):
            raise ValueError(f"{index} names the file {name!r}, expected a file of weights in its folder; {_REMEDY}")
