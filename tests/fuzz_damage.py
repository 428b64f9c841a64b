"""Whatever lies in a file that came from elsewhere: the object that was written comes back, or one sentence.

The law of every test of test_fuzz_*.py, and what they do to files: the reader returns what the file says, or raises
ValueError (a command's settings: UsageError) with one line that names the file. No other exception, no half of a
result, and no memory beyond a limit. tests/fuzz.py runs the same laws for as long as you like.
"""

import contextlib
import copy
import json
import os
import resource
import sys
from pathlib import Path

from hashtrain import ModelShape
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))
LAW = settings(
    deadline=None,
    max_examples=EXAMPLES,
    derandomize="FUZZ_EXAMPLES" not in os.environ,  # a longer run looks elsewhere each time
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
ADDRESS_SPACE, RESIDENT = 1 << 30, 1 << 26  # bytes that one read may add: the second with what libraries set up
SHAPE = ModelShape(1, 2, 1, 32)
NUMBERS = [0, 1, -1, 31, 33, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 63, (1 << 64) - 1, 1.5, 1e308]
TEXTS = ["", "..", "../config.json", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, "--help", "layers.0.w", "NaN"]
DEEP = "@deep@", "@digits@", "@huge@", "@twice@"
"""Stand for what `json.dumps` would not write."""


# What is done to files.


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """The bytes with a few changes: bits flipped, pieces cut, doubled, put in, or lengths that lie."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.one_of(st.integers(0, len(data)), st.integers(0, min(16, len(data)))))
        match draw(st.sampled_from(["flip", "cut", "truncate", "put", "double", "length", "zeros"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at : at + draw(st.integers(1, 64))]
            case "truncate":
                del data[at:]
            case "put":
                data[at:at] = draw(st.binary(min_size=1, max_size=16))
            case "double":
                data[at:at] = data[at : at + 64]
            case "length":
                data[at : at + 8] = draw(st.sampled_from([x for x in NUMBERS if type(x) is int and x >= 0])).to_bytes(
                    8, "little"
                )
            case "zeros":
                data[at : at + 32] = bytes(len(data[at : at + 32]))
    return bytes(data)


def places(value, path=()):
    """Every place in a JSON value, the whole first."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


HOSTILE = st.one_of(
    st.sampled_from([None, True, False, *NUMBERS, *TEXTS, *DEEP, float("nan"), float("inf"), [], {}, [[]], {"a": {}}]),
    st.sampled_from(range(-10, 11)),
    st.sampled_from(["a", "é", "\U0001f40d", " ", "\n", "lsh", "0"]),
)


def hostile():
    """A value that is not expected, and nobody else's."""
    return HOSTILE.map(copy.deepcopy)


@st.composite
def altered(draw, value) -> str:
    """The JSON text of a value with a few places changed, taken out or added."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        *path, last = draw(st.sampled_from([place for place in places(value) if place] or [("new",)]))
        holder = value
        for key in path:
            holder = holder[key]
        match draw(st.sampled_from(["set", "set", "remove", "add"])):
            case "set":
                holder[last] = draw(hostile())
            case "remove":
                holder.pop(last, None) if isinstance(holder, dict) else holder.pop(last)
            case "add":
                holder.update(new=draw(hostile())) if isinstance(holder, dict) else holder.append(draw(hostile()))
    text = json.dumps(draw(st.sampled_from([value] * 9 + [[value]])))
    forms = ("[" * 5000 + "]" * 5000, "9" * 5000, "1e999", '{"a": 1, "a": 2}')
    for mark, form in zip(DEEP, forms, strict=True):
        text = text.replace(json.dumps(mark), form)
    return text


# What must hold.


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
