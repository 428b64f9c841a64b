"""Read files that may come from elsewhere: whatever is in them, one sentence or what they say.

JSON is taken in its strict form (no NaN, no Infinity, no name twice, no lone surrogate, bounded size and depth), and
the header of a safetensors file is bounded before it is parsed. Nothing here follows a name out of its folder.
"""

from __future__ import annotations

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
"""Of a safetensors file: room for some 40,000 tensors, a parsed header takes many times its bytes."""


def parse_json(text: str, strict: bool = True) -> Any:
    """Return the value of a JSON text.

    Args:
        strict: refuse NaN and infinities, too.
    Raises: ValueError, saying what is wrong, for anything that two readers could take for different things.
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
        raise ValueError("it holds half of a surrogate pair, which is no character") from error
    return found


def read_json_object(path: Path, remedy: str, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object of at most `limit` bytes, in the strict form.

    Raises: ValueError naming the file and the remedy if it holds none; FileNotFoundError if there is no such file.
    """
    try:
        found = parse_json(read_text(path, limit))
    except ValueError as error:  # those of decoding among them
        raise ValueError(f"{path} is corrupt ({error}); {remedy}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is corrupt (expected a JSON object, got {type(found).__name__}); {remedy}")
    return found


def read_text(path: Path, limit: int) -> str:
    """Read UTF-8 text. Raises: ValueError if it is not, or larger than `limit` bytes, or no plain file."""
    if not stat.S_ISREG((status := path.stat()).st_mode):  # a pipe would keep us waiting
        raise ValueError("expected a plain file")
    if status.st_size > limit:
        raise ValueError(f"expected at most {limit} bytes, got {status.st_size}")
    with path.open("rb") as file:
        return file.read(limit).decode("utf-8")


def inside(path: Path) -> Path:
    """Return the path of a plain file that lies in the folder it is named in.

    A link is followed within the folder, and to the blobs of the Hub's cache if the folder is one of its snapshots.

    Raises: ValueError if it lies elsewhere, or a link leads back to itself; FileNotFoundError if there is none.
    """
    # Not `resolve`, which before Python 3.13 has an error of its own for a link that leads back to itself.
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
        raise ValueError(f"{path} is no plain file, expected one")
    return path


def one_line(error: BaseException) -> str:
    """Return an error's words without the line breaks that other libraries put between them."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def open_tensors(path: Path, remedy: str) -> Iterator[Any]:
    """Open a safetensors file as `safe_open` does, once the size of its header is known to be bearable.

    Raises: ValueError naming the file and the remedy if it cannot be read, or lacks what the block asks for;
        FileNotFoundError if there is no such file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(
                f"{path} says its header has {length} bytes, expected at most {MAX_HEADER_BYTES}; {remedy}"
            )
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
    raise ValueError(f"it holds {text}, which is no number of JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"it holds {text}, which is too large")
    return value


def _require_shallow(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
