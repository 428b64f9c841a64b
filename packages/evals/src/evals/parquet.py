"""Rows as a Parquet table: the same as rows.json, for those who work in columns."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
from hashtrain.atomic import replace

from evals.result import Row

_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64()}


def _schema() -> pa.Schema:
    """One column a field of `Row`, of its own type even where every value is null."""
    hints = get_type_hints(Row)
    columns = []
    for field in fields(Row):
        given = get_args(hints[field.name]) or (hints[field.name],)
        (kind,) = set(given) - {NoneType}
        columns.append(pa.field(field.name, _TYPES[kind], nullable=NoneType in given))
    return pa.schema(columns)


def write_parquet(path: Path, rows: list[Row]) -> None:
    """Replace `path` by the rows; a kill leaves the old file or the new one."""
    table = pa.Table.from_pylist([asdict(row) for row in rows], _schema())
    replace(path, lambda temporary: pq.write_table(table, temporary))


def read_parquet(path: Path) -> list[Row]:
    """Read the rows. Raises: ValueError naming the file if it holds none of this version."""
    try:
        return [Row(**line) for line in pq.read_table(path).to_pylist()]
    except (pa.ArrowInvalid, TypeError) as error:
        raise ValueError(f"{path} holds no rows of this version of evals ({error}); run the command again") from error
