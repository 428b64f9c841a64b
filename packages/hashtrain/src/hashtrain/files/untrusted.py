"""Read files from untrusted sources: return their content, or fail with one sentence.

JSON must be strict (no NaN, no infinity, no duplicate name, no lone surrogate, bounded size and depth), and the header
of a safetensors file is bounded before it is parsed. No path leads out of its folder.
"""

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError, safe_open

MAX_JSON_BYTES = 1 << 26
MAX_DEPTH = 64
MAX_HEADER_BYTES = 1 << 22
"""Limit on a safetensors header: about 40,000 tensors. A parsed header takes many times its bytes."""


def parse_json(text: str, strict: bool = True) -> Any:
    """Parse a JSON text; if `strict`, reject NaN and infinities, too.

    Raises: ValueError with the reason, for anything that two parsers could read differently.
    """
    numbers: dict[str, Any] = {"parse_constant": _no_number, "parse_float": _finite} if strict else {}
    try:
        found = json.loads(text, object_pairs_hook=_unique, **numbers)
        _require_shallow(found)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair, which is not a character") from error
    return found


def read_json_object(path: Path, remedy: str, limit: int = MAX_JSON_BYTES, strict: bool = True) -> dict[str, Any]:
    """Read a JSON object of at most `limit` bytes; `strict` as in `parse_json`.

    Raises: ValueError naming the file and the remedy if it is anything else; FileNotFoundError if it does not exist.
    """
    try:
        found = parse_json(read_text(path, limit), strict)
    except ValueError as error:  # includes decoding errors
        raise ValueError(f"{path} is corrupt ({error}); {remedy}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is corrupt (expected a JSON object, got {type(found).__name__}); {remedy}")
    return found


def read_text(path: Path, limit: int) -> str:
    """Read UTF-8 text. Raises: ValueError if it is not, is larger than `limit` bytes, or is not a regular file."""
    if not stat.S_ISREG((status := path.stat()).st_mode):  # reading a pipe could block
        raise ValueError("expected a regular file")
    if status.st_size > limit:
        raise ValueError(f"expected at most {limit} bytes, got {status.st_size}")
    with path.open("rb") as file:
        return file.read(status.st_size).decode("utf-8")  # never `limit`, which would be allocated


def inside(path: Path) -> Path:
    """Return the path of a regular file, after checking that it lies in the folder it is named in.

    Links are followed within the folder, and to the blobs of the Hub's cache if the folder is one of its snapshots.

    Raises: ValueError if it lies elsewhere, or a link is circular; FileNotFoundError if it does not exist.
    """
    # Not `resolve`: before Python 3.13 it raises another error for circular links.
    try:
        folder, target = (Path(os.path.realpath(place, strict=True)) for place in (path.parent, path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} is a link that leads to no file ({error.strerror}), expected a file") from error
    homes = [folder, folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [folder]
    if target.parent not in homes:
        raise ValueError(f"{path} is a link to a place outside its folder, expected a file; copy the file itself there")
    if not target.is_file():
        raise ValueError(f"{path} is not a regular file, expected one")
    return path


def one_line(error: BaseException) -> str:
    """Return an error's text on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextlib.contextmanager
def open_tensors(path: Path, remedy: str) -> Iterator[Any]:
    """Open a safetensors file like `safe_open`, after checking the size of its header.

    Raises: ValueError naming the file and the remedy if it cannot be read, or lacks a tensor that the block reads;
        FileNotFoundError if it does not exist.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            most = f"expected at most {MAX_HEADER_BYTES}; {remedy}"
            raise ValueError(f"{path} says its header has {length} bytes, {most}")
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is damaged or truncated ({one_line(error)}); {remedy}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it names {name!r} twice in one object")
        found[name] = value
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"it holds {text}, which is not a JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"it holds {text}, which is too large")
    return value


def _require_shallow(value: Any, levels: int = MAX_DEPTH) -> None:
    if isinstance(value, dict | list):
        if not levels:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        for inner in value.values() if isinstance(value, dict) else value:
            _require_shallow(inner, levels - 1)
