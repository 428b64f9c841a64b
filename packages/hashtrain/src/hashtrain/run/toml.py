"""A command's settings as a TOML file: read into command-line arguments, and written with the result."""

import json
import os
import platform
import tomllib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import hashtrain
from hashtrain.files.untrusted import read_text
from hashtrain.run.settings import GONE, TrainCommand
from hashtrain.usage import UsageError, sentence

_NOT_STORED = {"config", "dry_run"}
_MAX_BYTES = 1 << 20


def with_config(arguments: list[str]) -> list[str]:
    """Insert the settings of `--config FILE` after the command's name, before its arguments, which override them.

    Raises: UsageError if the file is missing, not TOML, or has an unknown setting.
    """
    words = [
        word for given in arguments for word in (given.split("=", 1) if given.startswith("--config=") else [given])
    ]
    if "--config" not in words:
        return arguments
    at = words.index("--config")
    if at + 1 == len(words):
        raise UsageError("--config needs a TOML file")
    if not (path := Path(words[at + 1])).exists():
        raise UsageError(f"--config: there is no file {path}")
    try:
        found = tomllib.loads(read_text(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:  # thousands of digits raise another ValueError
        raise UsageError(f"--config {path} is not a TOML file that can be read: {sentence(error)}") from error
    return [words[0], *_words(path, found), *words[1:at], *words[at + 2 :]]


def _words(path: Path, found: dict[str, Any]) -> list[str]:
    known = {f.name for f in fields(TrainCommand)} - _NOT_STORED
    words: list[str] = []
    for key, value in found.items():
        flag = f"--{key.replace('_', '-')}"
        if flag in GONE:
            if value in (False, "layers"):  # the default in an earlier version, whose runs stored it
                continue
            raise UsageError(f"--config {path} sets {key}, which left in hashtrain 2.0: {GONE[flag]}")
        if key.replace("-", "_") not in known:
            raise UsageError(f"--config {path} sets {key}, expected one of {', '.join(sorted(known))}")
        values = value if isinstance(value, list) else [value]
        if any(type(one) not in (str, int, float) or str(one).startswith("--") for one in values):
            raise UsageError(f"--config {path} sets {key} to {value!r}, expected numbers or strings that are not flags")
        words += [flag, *map(str, values)] if values else []
    return words


def as_toml(command: TrainCommand) -> str:
    """Return the settings as TOML that `--config` reads."""
    given = {key: value for key, value in asdict(command).items() if key not in _NOT_STORED and value is not None}
    plain = {key: [*map(str, value)] if isinstance(value, tuple) else value for key, value in given.items()}
    return "".join(f"{key} = {json.dumps(x, ensure_ascii=False, default=str)}\n" for key, x in plain.items())


def environment(device: str) -> dict[str, Any]:
    """Return the software versions and the hardware of this run."""
    import torch  # imported here because `--config` is read before `--help` is answered
    import transformers

    versions = {module.__name__: module.__version__ for module in (hashtrain, torch, transformers)}
    own = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
    return {**versions, **own, "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"}
