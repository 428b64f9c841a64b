"""What accidents and liars do to files, drawn from a generator, and what must hold when one is read.

The law: the reader returns what the file says, or raises ValueError with one line that names the file. No other
exception, no half of a result, and no memory beyond a limit.
"""

import atexit
import contextlib
import copy
import functools
import json
import resource
import sys
import tempfile
from pathlib import Path

ADDRESS_SPACE, RESIDENT = 1 << 30, 1 << 26  # bytes that one read may add: the second with what libraries set up
NUMBERS = [0, 1, 7, 31, 33, 255, 256, 1 << 16, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 63, (1 << 64) - 1]
TEXTS = ["", "..", "../config.json", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, "--help", "é", "\n", "NaN", "lsh"]
DEEP = {"@deep@": "[" * 5000 + "]" * 5000, "@digits@": "9" * 5000, "@huge@": "1e999", "@twice@": '{"a": 1, "a": 2}'}
"""Stand for what `json.dumps` would not write."""
STRANGE = [None, True, False, -1, 1.5, 1e308, float("nan"), float("inf"), [], {}, [[]], {"a": {}}, *DEEP]
HOSTILE = [*STRANGE, *NUMBERS, *TEXTS, *range(-3, 11)]


@functools.cache
def folder() -> Path:
    """A folder for all files of one process."""
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    return Path(made.name)


def one_of(rng, choices):
    return copy.deepcopy(choices[int(rng.integers(len(choices)))])


def damaged(rng, content: bytes, other: bytes = b"") -> bytes:
    """Change pieces of a file: flipped, cut, doubled, zeroed, put in, taken from another, lengths that lie."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(min(16, len(data)) + 1 if rng.random() < 0.3 else len(data) + 1))
        length = one_of(rng, [1, 4, 32, 64, 256])
        match rng.integers(9):
            case 0 if at < len(data):
                data[at] ^= 1 << int(rng.integers(8))
            case 1:
                del data[at : at + length]
            case 2:
                del data[at:]
            case 3:
                data[at:at] = rng.bytes(length)
            case 4:
                data[at:at] = data[at : at + length]
            case 5:
                data[at : at + length] = bytes(len(data[at : at + length]))
            case 6:
                data[at : at + 8] = one_of(rng, NUMBERS).to_bytes(8, "little")
            case 7:
                data[at : at + length] = other[at : at + length]
            case _:
                data[at:] = other[at:]
    return bytes(data)


def places(value, path=()):
    """Every place in a JSON value, the whole first."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def altered(rng, value) -> bytes:
    """The JSON text of a value with a place or two changed, taken out or added; or the text, damaged."""
    if rng.random() < 0.4:
        return damaged(rng, json.dumps(value).encode())
    value = copy.deepcopy(value)
    for _ in range(int(rng.integers(1, 3))):
        *path, last = one_of(rng, [place for place in places(value) if place] or [("new",)])
        holder = functools.reduce(lambda found, key: found[key], path, value)
        match rng.integers(4):
            case 0:
                holder.pop(last, None) if isinstance(holder, dict) else holder.pop(last)
            case 1:
                new = one_of(rng, HOSTILE)
                holder.update(new=new) if isinstance(holder, dict) else holder.append(new)
            case _:
                holder[last] = one_of(rng, HOSTILE)
    text = json.dumps(value if rng.random() < 0.9 else [value])
    for mark, form in DEEP.items():
        text = text.replace(json.dumps(mark), form)
    return text.encode("utf-8", "surrogatepass")


@contextlib.contextmanager
def little_memory():
    """Refuse the process more address space than it has and a bit, and measure what becomes resident."""
    if sys.platform != "linux":
        yield
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    start = peak()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert peak() - start < RESIDENT


def peak() -> int:
    """The largest resident size since it was last cleared, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def found(read, name: str, refused: type[Exception] = ValueError):
    """What `read()` returns, or None if it refuses in one line with the file's name."""
    with little_memory():
        try:
            return read()
        except refused as error:
            kind, text = type(error), str(error)
    assert kind is refused
    assert name in text
    assert "\n" not in text
    assert len(text) > len(name) + 10
    return None
