"""Read texts from files and from the Hub, or fail with one sentence.

    my.txt, folder/                       UTF-8 text
    my.jsonl, my.parquet                  the field `text`, else `content` or `code`
    hub:emozilla/pg19:train               a data set on the Hub: id, split (default train), field
    hub:namespace-Pt/long-llm-data/lm/proof-pile.json     one file of a data set
    hub:allenai/c4@en:validation:text     one of its configurations

Everything except plain text is streamed by `datasets` (the extra of that name): only what is read is downloaded.
"""

# `datasets` has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import codecs
import collections
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashtrain.files.untrusted import first_line
from hashtrain.usage import require_package, require_plain_file

HUB = "hub:"
LEAST = 1 << 20
"""Fewest bytes read of a file that is read at all; smaller files are read whole."""
_LEAST_ROOM = 64 << 20
_BYTES_PER_TOKEN = 8  # English has about 4.3, Python 3.3; some text is lost at the ends of documents
_PLAIN = {".txt", ".md", ".py"}
_TABLES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_FIELDS = ("text", "content", "code")
_MOST_BYTES = 1 << 30
_LONG_LINE, _FEW_LINES = 30, 5  # shorter lines, and fewer of them, may be equal by chance


@dataclass(frozen=True)
class Document:
    """A text with a name that a report may print (never an absolute path)."""

    name: str
    text: str
    corpus: int = 0
    """Index of the path it was read from; contexts are drawn from all paths in turn."""
    cut: bool = False
    """Whether `split` cut it from a text whose other part is used, too."""


def read_texts(paths: list[Path], room: int | None = None, seed: int = 0) -> list[Document]:
    """Read the documents of files, folders (all files below them with a known suffix) and Hub ids.

    Args:
        room: most bytes of text, divided equally among the paths (`shares`); None: no limit.
        seed: draws the files if not all are read.
    Raises: ValueError if a path is missing, binary, not UTF-8 or has no text, or is a table and the extra `datasets` is
        missing.
    """
    documents: list[Document] = []
    own = None if room is None else room // max(1, len(paths))
    read = dict[Path, Path]()
    for corpus, path in enumerate(paths):
        found: list[Document] = []
        if str(path).startswith(HUB):
            rows, field = _hub_rows(str(path))
            found += _of_rows(rows, field, str(path), own, corpus)
        else:
            for file, size in shares(_files(path), own, seed).items():
                if (real := file.resolve()) in read:
                    raise ValueError(f"{file} is given twice, by {read[real]} and {path}: name each text once")
                read[real] = path
                if file.suffix in _TABLES:
                    if not file.stat().st_size:
                        raise ValueError(f"{file} is empty: expected rows with a text")
                    rows = _stream(_TABLES[file.suffix], file.name, data_files=str(file))
                    found += _of_rows(rows, None, file.name, size, corpus)
                else:
                    found.append(Document(file.name, _plain_text(file, size), corpus))
        if not (found := [document for document in found if document.text.strip()]):
            kinds = ".txt, .md, .py, .jsonl or .parquet"
            raise ValueError(f"no text found in {path}: expected {kinds} files that hold more than white space")
        documents += found
    return documents


def _files(path: Path) -> list[Path]:
    """Return a file, or all files below a folder that have a known suffix. Raises: ValueError if there is none."""
    if not path.exists():
        hint = f", or {HUB}{path} for the data set on the Hub" if _is_hub_id(path) else ""
        raise ValueError(f"text file not found: expected a file or folder at {path}{hint}")
    require_plain_file(path, "the text")
    known = (_PLAIN | set(_TABLES)) - {".json"}  # in a folder, mostly no table
    # is_file excludes folders, pipes and broken links with such a name.
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in known and p.is_file())


def apart(train: Sequence[Document], validation: Sequence[Document], given: bool = False) -> list[Document]:
    """Return the training documents that hold no held-out one: results on training text would be meaningless.

    A document holds another if it equals it or contains most of its long lines, or all of one cut from the same text.

    Args: given: whether the held-out texts were, by --held-out-text; training texts must then not hold them.
    Raises: ValueError naming the first such pair, if `given` or if both were cut from the same text; if none is left.
    """
    texts = {document.text.strip(): document for document in validation}
    parts = {document.name: document for document in validation}
    lines: dict[str, set[int]] = {}
    long = [list(long_lines(document.text)) for document in validation]
    wanted = [set(own) for own in long]
    for number, own in enumerate(long):
        for line in own if len(own) >= _FEW_LINES else ():
            lines.setdefault(line, set()).add(number)
    kept: list[Document] = []
    for document in train:
        known = {line for line in long_lines(document.text) if line in lines}
        shared = collections.Counter(n for line in known for n in lines[line])
        copies = [validation[number] for number, count in shared.items() if count > len(wanted[number]) / 2]
        if (part := parts.get(document.name)) and part.text.strip() in document.text:
            copies.append(part)
        same = texts.get(document.text.strip()) or next(iter(copies), None)
        if not same:
            kept.append(document)
        elif same.name == document.name and given:
            what = "is in what is trained on and in --held-out-text: expected it in one"
            raise ValueError(f"{same.name} {what}; leave it out of the other")
        elif same.name == document.name and same.cut:
            what = "is also in what is trained on: it repeats itself, or two texts have that name"
            raise ValueError(f"the held-out part of {same.name} {what}; give another text, or --held-out-text")
        elif given:
            raise ValueError(
                f"{document.name} holds most of the held-out text {same.name}: expected texts that share no document; "
                "remove the duplicate, or give another --held-out-text"
            )
    if not kept:
        what = "each training text holds most of a held-out one"
        raise ValueError(f"{what}: expected texts that share no document; give others, or --held-out-text")
    return kept


def long_lines(text: str) -> Iterator[str]:
    """Yield lines too long to be equal by chance; if the text is a single line, its sentences."""
    lines = text.splitlines()
    for piece in lines if len(lines) > 1 else text.split(". "):
        if len(stripped := piece.strip()) >= _LONG_LINE:
            yield stripped


def _plain_text(file: Path, size: int | None) -> str:
    """Read the first `size` bytes of a text file, None for all; the part may end within a character."""
    bytes_there = file.stat().st_size
    if size is None and bytes_there > _MOST_BYTES:
        raise ValueError(f"{file} has {bytes_there} bytes, expected at most {_MOST_BYTES}; cut it into several files")
    with file.open("rb") as opened:
        content = opened.read(size or bytes_there)  # what is read is allocated first; never all of a file that grows
    if b"\0" in content:
        raise ValueError(f"{file} is binary: expected UTF-8 text, got a zero byte at {content.index(0)}")
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(content, final=size is None)
    except UnicodeDecodeError as error:
        what = f"byte {error.start} cannot be read"
        raise ValueError(f"{file} is not UTF-8 text: {what}; convert it with iconv first") from error


def _hub_rows(text: str) -> tuple[Iterable[dict[str, Any]], str | None]:
    """Stream the rows of `hub:OWNER/NAME[/FILE][@CONFIG][:SPLIT[:FIELD]]`; return them and the field.

    Raises: ValueError if the text does not match.
    """
    place, _, more = text.removeprefix(HUB).partition(":")
    split, _, field = more.partition(":")
    place, _, config = place.partition("@")
    parts = place.split("/")
    if len(parts) < 2 or not all(parts):
        raise ValueError(f"expected hub:OWNER/NAME[/FILE][@CONFIG][:SPLIT[:FIELD]], got {text}")
    if len(parts) == 2:
        return _stream(place, HUB + place, split or "train", name=config or None), field or None
    if (suffix := Path(place).suffix) not in _TABLES:
        raise ValueError(f"expected a file ending in {', '.join(_TABLES)}, got {parts[-1]}")
    return _stream(_TABLES[suffix], HUB + place, data_files=f"hf://datasets/{place}"), field or None


def _stream(path: str, shown: str, split: str = "train", **options: Any) -> Iterable[dict[str, Any]]:
    """Return the rows of a table or data set, which is opened when the first one is read: `_of_rows` has all errors."""
    require_package("datasets", f"reading {shown}", "datasets")
    import datasets

    def rows() -> Iterator[dict[str, Any]]:
        yield from datasets.load_dataset(path, split=split, streaming=True, **options)

    return rows()


def _of_rows(
    rows: Iterable[dict[str, Any]], field: str | None, name: str, room: int | None, corpus: int
) -> list[Document]:
    documents: list[Document] = []
    try:
        for number, row in enumerate(rows):
            text = row.get(field or next((f for f in _FIELDS if f in row), ""))
            if not isinstance(text, str):
                wanted = field or " or ".join(_FIELDS)
                got = f"got the fields {', '.join(row)}" if text is None else f"got {type(text).__name__}"
                raise ValueError(f"row {number + 1}: expected a string in the field {wanted}, {got}")
            documents.append(Document(f"{name}, row {number + 1}", text[:room], corpus))
            if room is not None and (room := room - len(text)) <= 0:
                break
    except Exception as error:  # every reader of `datasets` raises its own kind, also RecursionError
        remedy = "; give a local .jsonl or .txt file to --text" if name.startswith(HUB) else ""
        raise ValueError(f"{name} cannot be read: {first_line(error)}{remedy}") from error
    return documents


def _is_hub_id(path: Path) -> bool:
    """Whether a path that does not exist has the form OWNER/NAME of a data set."""
    return len(path.parts) == 2 and not path.is_absolute() and not path.suffix and not str(path).startswith(".")


def room_for(tokens: int) -> int:
    """Return how many bytes of text to read to get this many tokens, with a margin."""
    return max(_LEAST_ROOM, _BYTES_PER_TOKEN * tokens)


def shares(files: Sequence[Path], room: int | None, seed: int = 0) -> dict[Path, int | None]:
    """Decide how many bytes to read of each file, from its beginning; None: the whole file.

    If all files fit into `room` bytes, or there is no limit, all are read whole, in their order. Otherwise files are
    drawn at random until the room is used. Each has an equal share of it, at least `LEAST` bytes. Only file sizes are
    inspected.
    """
    sizes = {file: file.stat().st_size for file in files}
    if room is None or sum(sizes.values()) <= room:
        return dict.fromkeys(files)
    drawn = list(files)
    random.Random(seed).shuffle(drawn)
    share, left, found = max(LEAST, room // len(drawn)), room, dict[Path, int | None]()
    for file in drawn:
        if left <= 0:
            break
        found[file] = share if sizes[file] > share else None
        left -= min(sizes[file], share)
    return found
