"""Read a task's own JSON lines: a bad line is one sentence with its file and number, never a score of 0."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from datasets import Dataset
from hashtrain.files.untrusted import one_line, parse_json, read_text

_MOST_BYTES = 1 << 31


def read_lines(path: Path, needed: Collection[str], references: str) -> Dataset:
    """Read a file of JSON objects, one a line; blank lines are skipped.

    LongBench's own files name the question `input`: it is also given as `question` if the task needs that.

    Args:
        needed: fields that the task reads from every line.
        references: the field with the accepted answers, a list of texts, if it is needed. A text in place of the list
            would be compared letter by letter, and no answer would ever match an empty one.
    Raises: ValueError naming the file and the line that is not such an object, lacks a field, or has a blank context,
        no usable answer, or a field of another kind than the lines before.
    """
    try:
        text = read_text(path, _MOST_BYTES)
    except ValueError as error:  # includes decoding errors
        raise ValueError(f"{path} cannot be read ({error}): expected lines of JSON in UTF-8") from error
    kinds, rows = dict[str, str](), list[dict[str, Any]]()
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines, which cuts at U+2028 within a string
        if not line.strip():
            continue
        try:
            row = _row(line, needed, references)
            for name, value in row.items():
                kind = "number" if isinstance(value, int | float) else type(value).__name__
                if value is not None and kinds.setdefault(name, kind) != kind:
                    raise ValueError(f"`{name}` is a {kind}, in the lines before a {kinds[name]}")
        except ValueError as error:
            raise ValueError(f"line {number} of {path}: {error}") from error
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no lines: expected a JSON object with {', '.join(sorted(needed))} in each")
    try:
        return Dataset.from_list(rows)
    except (ValueError, TypeError, OverflowError) as error:  # within a field: lists of different kinds, huge numbers
        raise ValueError(f"{path} has fields that are no columns of a table: {one_line(error)}") from error


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
    answers: Any = row[references] if references in needed else None
    if references in needed and not (isinstance(answers, list) and answers and all(map(_is_text, answers))):
        raise ValueError(f"expected a list of one or more texts in `{references}`, got {json.dumps(answers)[:60]}")
    return row


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
