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
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashtrain.data.shares import Span, shares
from hashtrain.files.untrusted import first_line
from hashtrain.usage import require_package, require_plain_file

HUB = "hub:"
_DATA_SET = "the data set "
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


@dataclass(frozen=True)
class HubText:
    """A data set on the Hub: `hub:OWNER/NAME[/FILE][@CONFIG][:SPLIT[:FIELD]]`."""

    repository: str
    file: str | None
    config: str | None
    split: str
    field: str | None

    @classmethod
    def parse(cls, text: str) -> "HubText":
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
            place = f"{self.repository}/{self.file}"
            return _stream(_builder(Path(self.file)), HUB + place, data_files=f"hf://datasets/{place}")
        shown = f"{_DATA_SET}{self.repository}, split {self.split}"
        return _stream(self.repository, shown, self.split, name=self.config)


def read_texts(paths: list[Path], at_most: int = 200_000, room: int | None = None, seed: int = 0) -> list[Document]:
    """Read the documents of files, folders (all files below them with a known suffix) and Hub ids.

    Args:
        at_most: largest number of documents from one table or data set.
        room: most bytes of text, divided equally among the paths (`hashtrain.data.shares`); None: no limit.
        seed: draws the files if not all are read.
    Raises: ValueError if a path is missing, binary, not UTF-8 or has no text, or is a table and the extra `datasets` is
        missing.
    """
    documents: list[Document] = []
    own = None if room is None else room // max(1, len(paths))
    for corpus, path in enumerate(paths):
        if str(path).startswith(HUB):
            source = HubText.parse(str(path))
            documents += _of_rows(source.rows(), source.field, str(path), at_most, own, corpus)
            continue
        if not path.exists():
            hint = f", or {HUB}{path} for the data set on the Hub" if _is_hub_id(path) else ""
            raise ValueError(f"text file not found: expected a file or folder at {path}{hint}")
        known = _PLAIN | set(_TABLES)
        require_plain_file(path, "the text")
        # is_file excludes folders, pipes and broken links with such a name.
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in known and p.is_file())
        for span in shares(files, own, seed, lambda file: file.suffix in _TABLES):
            if span.file.suffix in _TABLES:
                if not span.file.stat().st_size:
                    raise ValueError(f"{span.file} is empty: expected rows with a text")
                rows = _stream(_TABLES[span.file.suffix], span.file.name, data_files=str(span.file))
                documents += _of_rows(rows, None, span.file.name, at_most, span.size, corpus)
            else:
                documents.append(_read_span(span, corpus))
    documents = [document for document in documents if document.text and not document.text.isspace()]
    if not documents:
        named = ", ".join(map(str, paths))
        raise ValueError(f"no text found: expected non-empty .txt, .md, .py, .jsonl or .parquet files in {named}")
    return documents


def require_apart(train: Sequence[Document], validation: Sequence[Document]) -> None:
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
    lines = text.splitlines()
    for piece in lines if len(lines) > 1 else text.split(". "):
        if len(stripped := piece.strip()) >= _LONG_LINE:
            yield stripped


def _read_span(span: Span, corpus: int) -> Document:
    """Read a part of a text file. A part may begin and end within a character, which is then dropped."""
    file = span.file
    if span.size is None and (size := file.stat().st_size) > _MOST_BYTES:
        raise ValueError(f"{file} has {size} bytes, expected at most {_MOST_BYTES}; cut it into several files")
    with file.open("rb") as opened:
        opened.seek(span.start)
        content = opened.read(span.size or _MOST_BYTES)  # bounded, in case the file grows
    if b"\0" in content:
        raise ValueError(f"{file} is binary: expected UTF-8 text, got a zero byte at {span.start + content.index(0)}")
    skipped = 0
    while span.start and skipped < min(3, len(content)) and content[skipped] & 0xC0 == 0x80:  # inside a character
        skipped += 1
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content[skipped:], final=span.size is None)
    except UnicodeDecodeError as error:
        what = f"byte {span.start + skipped + error.start} cannot be read"
        raise ValueError(f"{file} is not UTF-8 text: {what}; convert it with iconv first") from error
    return Document(f"{file.name}, from byte {span.start}" if span.start else file.name, text, corpus)


def _builder(file: Path) -> str:
    if file.suffix not in _TABLES:
        raise ValueError(f"expected a file ending in {', '.join(_TABLES)}, got {file.name}")
    return _TABLES[file.suffix]


def _stream(path: str, shown: str, split: str = "train", **options: Any) -> Iterable[dict[str, Any]]:
    require_package("datasets", f"reading {shown}", "datasets")
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        return datasets.load_dataset(path, split=split, streaming=True, **options)
    except (OSError, ValueError, DatasetsError) as error:
        raise _unreadable(shown, error) from error


def _of_rows(
    rows: Iterable[dict[str, Any]], field: str | None, name: str, at_most: int, room: int | None, corpus: int
) -> list[Document]:
    documents: list[Document] = []
    try:
        for number, row in enumerate(itertools.islice(rows, at_most)):
            text = row.get(field or next((f for f in _FIELDS if f in row), ""))
            if not isinstance(text, str):
                wanted = field or " or ".join(_FIELDS)
                raise ValueError(f"expected a string in the field {wanted}, got the fields {', '.join(row)}")
            documents.append(Document(f"{name}, row {number + 1}", text[:room], corpus))
            if room is not None and (room := room - len(text)) <= 0:
                break
    except Exception as error:  # every reader of `datasets` raises its own kind
        raise _unreadable(name, error) from error
    return documents


def _unreadable(shown: str, error: BaseException) -> ValueError:
    """Return an error for a table or data set that cannot be read; for the Hub, with an offline alternative."""
    remedy = "; give a local .jsonl or .txt file to --text" if shown.startswith((HUB, _DATA_SET)) else ""
    return ValueError(f"{shown} cannot be read: {first_line(error)}{remedy}")


def _is_hub_id(path: Path) -> bool:
    """Whether a path that does not exist has the form OWNER/NAME of a data set."""
    return len(path.parts) == 2 and not path.is_absolute() and not path.suffix and not str(path).startswith(".")
