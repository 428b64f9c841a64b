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

from __future__ import annotations

import codecs
import collections
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hashtrain.data.shares import shares
from hashtrain.usage import require_plain_file

HUB = "hub:"
_DATA_SET = "the data set "
_PLAIN = {".txt", ".md", ".py"}
_TABLES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_FIELDS = ("text", "content", "code")
_ENDS = r"\n\v\f\x1c-\x1e\x85\u2028\u2029"  # the line ends of `str.splitlines`, without \r
_LINE = re.compile(rf"[^\r{_ENDS}]+")
_LINE_END = re.compile(rf"(\r\n?+|[{_ENDS}])(?!\Z)")
_MOST_BYTES = 1 << 30
_LONG_LINE, _FEW_LINES = 30, 5  # shorter lines, and fewer of them, may be equal by chance


@dataclass(frozen=True)
class Document:
    """A text with a name that a report may print (never an absolute path)."""

    name: str
    text: str
    corpus: int = 0
    """Index of the path it was read from; contexts are drawn from all paths in turn."""


@dataclass(frozen=True)
class HubText:
    """A data set on the Hub: `hub:OWNER/NAME[/FILE][@CONFIG][:SPLIT[:FIELD]]`."""

    repository: str
    file: str | None
    config: str | None
    split: str
    field: str | None

    @classmethod
    def parse(cls, text: str) -> HubText:
        """Parse the form above. Raises: ValueError if the text does not match."""
        place, _, more = text.removeprefix(HUB).partition(":")
        split, _, field = more.partition(":")
        place, _, config = place.partition("@")
        parts = place.split("/")
        if len(parts) < 2 or not all(parts):
            raise ValueError(f"expected hub:OWNER/NAME[/FILE][@CONFIG][:SPLIT[:FIELD]], got {text}")
        file = "/".join(parts[2:]) or None
        return cls("/".join(parts[:2]), file, config or None, split or "train", field or None)

    def rows(self) -> Iterable[dict[str, Any]]:
        """Stream the rows."""
        if self.file:
            return _stream(
                _builder(Path(self.file)),
                shown=f"{HUB}{self.repository}/{self.file}",
                data_files=f"hf://datasets/{self.repository}/{self.file}",
            )
        return _stream(
            self.repository, f"{_DATA_SET}{self.repository}, split {self.split}", self.split, name=self.config
        )


def read_texts(paths: list[Path], at_most: int = 200_000, room: int | None = None, seed: int = 0) -> list[Document]:
    """Read documents from files, folders (all files below them with a known suffix) and Hub ids.

    Args:
        at_most: largest number of documents from one table or data set.
        room: most bytes of text to keep, divided equally among the paths (`hashtrain.data.shares`); None: no limit.
        seed: draws the files if not all are read.
    Raises: ValueError if a path is missing, has no text, is binary or not UTF-8, or is a table and the extra `datasets`
        is missing.
    """
    documents: list[Document] = []
    own = None if room is None else room // max(1, len(paths))
    for corpus, path in enumerate(paths):
        if str(path).startswith(HUB):
            source = HubText.parse(str(path))
            found = _of_rows(source.rows(), source.field, str(path), at_most, own)
            documents += [replace(document, corpus=corpus) for document in found]
            continue
        if not path.exists():
            hint = f", or {HUB}{path} for the data set on the Hub" if _is_hub_id(path) else ""
            raise ValueError(f"text file not found: expected a file or folder at {path}{hint}")
        known = _PLAIN | set(_TABLES)
        require_plain_file(path, "the text")
        # is_file excludes folders, pipes and broken links with such a name.
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in known and p.is_file())
        for file, most in shares(files, own, seed):
            documents += [replace(document, corpus=corpus) for document in _read_file(file, at_most, most)]
    documents = [document for document in documents if document.text and not document.text.isspace()]
    if not documents:
        found = ", ".join(map(str, paths))
        raise ValueError(f"no text found: expected non-empty .txt, .md, .py, .jsonl or .parquet files in {found}")
    return documents


def require_apart(train: list[Document], validation: list[Document]) -> None:
    """Reject a training document that equals a held-out one or contains most of its long lines.

    Raises: ValueError naming the first such pair: results on training text would be meaningless.
    """
    texts = {document.text.strip(): document for document in validation}
    lines: dict[str, set[int]] = {}
    wanted = [set(long_lines(document.text)) for document in validation]
    for number, own in enumerate(wanted):
        for line in own if len(own) >= _FEW_LINES else ():
            lines.setdefault(line, set()).add(number)
    for document in train:
        known = {line for line in long_lines(document.text) if line in lines}
        shared = collections.Counter(n for line in known for n in lines[line])
        copies = [validation[number] for number, count in shared.items() if count > len(wanted[number]) / 2]
        if same := texts.get(document.text.strip()) or next(iter(copies), None):
            raise ValueError(
                f"{document.name} holds most of the held-out text {same.name}: expected texts that share no document; "
                "remove the duplicate, or give another --held-out-text"
            )


def long_lines(text: str) -> Iterator[str]:
    """Yield lines too long to be equal by chance; if the text is a single line, its sentences."""
    several = _LINE_END.search(text) is not None
    for piece in (found[0] for found in _LINE.finditer(text)) if several else _sentences(text):
        if len(stripped := piece.strip()) >= _LONG_LINE:
            yield stripped


def _sentences(text: str) -> Iterator[str]:
    """Split a text at each full stop before a space, lazily, because the text may be large."""
    start = 0
    while start < len(text):
        end = text.find(". ", start)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end + 2


def _read_file(file: Path, at_most: int, most: int | None) -> list[Document]:
    if file.suffix in _TABLES:
        if not file.stat().st_size:
            raise ValueError(f"{file} is empty: expected rows with a text")
        return _of_rows(_stream(_builder(file), file.name, data_files=str(file)), None, file.name, at_most, most)
    if most is None and (size := file.stat().st_size) > _MOST_BYTES:
        raise ValueError(f"{file} has {size} bytes, expected at most {_MOST_BYTES}; cut it into several files")
    with file.open("rb") as opened:
        content = opened.read(most or _MOST_BYTES)  # bounded, in case the file grows
    if b"\0" in content:
        raise ValueError(f"{file} is binary: expected UTF-8 text, got a zero byte at {content.index(0)}")
    try:
        # A part may end within a character, which is then dropped.
        return [Document(file.name, codecs.getincrementaldecoder("utf-8")().decode(content, final=most is None))]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text: byte {error.start} cannot be read; convert it with iconv first"
        ) from error


def _builder(file: Path) -> str:
    if file.suffix not in _TABLES:
        raise ValueError(f"expected a file ending in {', '.join(_TABLES)}, got {file.name}")
    return _TABLES[file.suffix]


def _stream(path: str, shown: str, split: str = "train", **options: Any) -> Iterable[dict[str, Any]]:
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        install = "in the checkout `uv pip install './packages/hashtrain[datasets]'`"
        raise ValueError(f"reading {shown} needs the package datasets, which is not installed: {install}") from error
    try:
        return datasets.load_dataset(path, split=split, streaming=True, **options)
    except (OSError, ValueError, DatasetsError) as error:
        raise _unreadable(shown, error) from error


def _of_rows(
    rows: Iterable[dict[str, Any]], field: str | None, name: str, at_most: int, room: int | None
) -> list[Document]:
    documents: list[Document] = []
    left = room
    try:
        for number, row in enumerate(itertools.islice(rows, at_most)):
            text = row.get(field or next((f for f in _FIELDS if f in row), ""))
            if not isinstance(text, str):
                wanted = field or " or ".join(_FIELDS)
                raise ValueError(f"expected a string in the field {wanted}, got the fields {', '.join(row)}")
            documents.append(Document(f"{name}, row {number + 1}", text if left is None else text[:left]))
            if left is not None and (left := left - len(text)) <= 0:
                break
    except Exception as error:  # every reader of `datasets` raises its own kind
        raise _unreadable(name, error) from error
    return documents


def _unreadable(shown: str, error: BaseException) -> ValueError:
    """Return an error for a table or data set that cannot be read; for the Hub, with an offline alternative."""
    remedy = "; give a local .jsonl or .txt file to --text" if shown.startswith((HUB, _DATA_SET)) else ""
    return ValueError(f"{shown} cannot be read: {_first_line(error)}{remedy}")


def _is_hub_id(path: Path) -> bool:
    """Whether a path that does not exist has the form OWNER/NAME of a data set."""
    return len(path.parts) == 2 and not path.is_absolute() and not path.suffix and not str(path).startswith(".")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
