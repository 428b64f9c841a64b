"""Rows as a Parquet table, with the same content as rows.json."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
from hashtrain.files.atomic import replace
from hashtrain.files.untrusted import one_line

from evals.result import Row, checked

_MAX_ROWS, _MAX_BYTES = 1 << 20, 1 << 28
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


def read_parquet(path: Path) -> list[Row]:
    """Read the rows. Raises: ValueError naming the file if it does not hold rows of this version."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            found, schema = file.metadata, file.schema_arrow
            if found.num_rows > _MAX_ROWS or not schema.equals(_schema()):
                raise ValueError(f"expected at most {_MAX_ROWS} rows of {len(fields(Row))} columns")
            return [checked(Row(**line)) for line in _table(file).to_pylist()]
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, TypeError, ValueError, MemoryError) as error:
        raise ValueError(
            f"{path} holds no rows of this version of evals ({one_line(error)}); rerun the command"
        ) from error


def _table(file: pq.ParquetFile) -> pa.Table:
    """Read a file after checking that its row groups match its footer and its columns are not too large."""
    found = file.metadata
    groups = [found.row_group(number) for number in range(found.num_row_groups)]
    if sum(group.num_rows for group in groups) != found.num_rows or len(groups) > _MAX_ROWS:
        raise ValueError("its row groups do not add up")
    size = sum(group.column(c).total_uncompressed_size for group in groups for c in range(group.num_columns))
    if size > _MAX_BYTES:
        raise ValueError(f"expected at most {_MAX_BYTES} bytes of columns, got {size}")
    table = file.read(use_threads=False)
    if table.num_rows != found.num_rows:
        raise ValueError(f"expected {found.num_rows} rows, got {table.num_rows}")
    table.validate(full=True)
    return table
