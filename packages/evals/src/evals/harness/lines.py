"""Read a task's own JSON lines: a bad line is one sentence with its file and number, never a score of 0."""

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from hashtrain.files.untrusted import one_line, parse_json, read_text

_MOST_BYTES = 1 << 31


def read_lines(paths: Sequence[Path], needed: Collection[str], references: str) -> Dataset:
    """Read files of JSON objects, one a line, behind each other; blank lines are skipped.

    LongBench's own files name the question `input`: it is also given as `question` if the task needs that.

    Args:
        needed: fields that the task reads from every line.
        references: the field with the accepted answers, a list of texts, if it is needed. A text in place of the list
            would be compared letter by letter, and no answer would ever match an empty one.
    Raises: ValueError naming the file and the line that is not such an object, lacks a field, or has a blank context,
        no usable answer, or a field of another kind than the lines before.
    """
    kinds, rows = dict[str, str](), list[dict[str, Any]]()
    for path in paths:
        before = len(rows)
        for number, line in _lines(path):
            try:
                row = _row(line, needed, references)
                for name, value in row.items():
                    kind = "number" if isinstance(value, int | float) else type(value).__name__
                    if value is not None and kinds.setdefault(name, kind) != kind:
                        raise ValueError(f"`{name}` is a {kind}, in the lines before a {kinds[name]}")
            except ValueError as error:
                raise ValueError(f"line {number} of {path}: {error}") from error
            rows.append(row)
        if len(rows) == before:
            raise ValueError(f"{path} has no lines: expected a JSON object with {', '.join(sorted(needed))} in each")
    try:
        return Dataset.from_list(rows)
    except (ValueError, TypeError, OverflowError) as error:  # within a field: lists of different kinds, huge numbers
        raise ValueError(f"{paths[-1]} has fields that are no columns of a table: {one_line(error)}") from error


def require_texts(value: Any, name: str, place: str = "") -> None:
    """Raise ValueError, with the place before its sentence, if the answers in the field `name` are no list of texts."""
    if not (isinstance(value, list) and value and all(map(_is_text, value))):
        shown = json.dumps(value, default=str)[:60]
        raise ValueError(f"{place}expected a list of one or more texts in `{name}`, got {shown}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not blank, with their numbers."""
    try:
        text = read_text(path, _MOST_BYTES)
    except ValueError as error:  # includes decoding errors
        raise ValueError(f"{path} cannot be read ({error}): expected lines of JSON in UTF-8") from error
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines, which cuts at U+2028 within a string
        if line.strip():
            yield number, line


def _row(line: str, needed: Collection[str], references: str) -> dict[str, Any]:
    """Parse and check one line. Raises: ValueError without the place."""
    row: Any = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    if "question" in needed and "question" not in row and "input" in row:
        row["question"] = row["input"]
    if missing := sorted(name for name in needed if row.get(name) is None):
        raise ValueError(f"expected the fields {', '.join(sorted(needed))}, {', '.join(missing)} is missing or null")
    if "context" in needed and not _is_text(row["context"]):
        raise ValueError("expected a text in `context`, got none")
    if references in needed:
        require_texts(row[references], references)
    return row


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
