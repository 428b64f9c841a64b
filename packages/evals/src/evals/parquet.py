"""Rows as a Parquet table, with the same content as rows.json."""

from dataclasses import asdict, fields
from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
from hashtrain.files.atomic import replace

from evals.result import Row

_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64()}


def _schema() -> pa.Schema:
    """Return one column per field of `Row`, with the field's type even if every value is null."""
    hints = get_type_hints(Row)
    columns = []
    for field in fields(Row):
        given = get_args(hints[field.name]) or (hints[field.name],)
        (kind,) = set(given) - {NoneType}
        columns.append(pa.field(field.name, _TYPES[kind], nullable=NoneType in given))
    return pa.schema(columns)


def write_parquet(path: Path, rows: list[Row]) -> None:
    """Replace `path` by the rows, atomically."""
    table = pa.Table.from_pylist([asdict(row) for row in rows], _schema())
    replace(path, lambda temporary: pq.write_table(table, temporary, write_page_checksum=True))
