"""Rows as Parquet: equal to the rows as JSON, and written atomically."""

import json

import pyarrow.parquet as pq
import pytest
from evals.results import Row, rows_from_json, rows_to_text, write_parquet
from evals.tasks import ppl

ROW = Row("ppl", "lsh", "lsh", 64, 0.1, "visible", 0.1, 1, 0, 0, "everywhere", "kl", 0.5, 0.4, 0.6, 3, 0, "1.0")
SPARE = Row("ppl", DENSE := "dense", DENSE, None, None, DENSE, 1.0, 1, 0, 0, "rows", "kl", 1e-300, None, None, 1, 0, "")


def read(path):
    return [Row(**line) for line in pq.read_table(path, page_checksum_verification=True).to_pylist()]


def test_rows_come_back_as_they_were(tmp_path):
    rows = [ROW, SPARE]
    write_parquet(tmp_path / "rows.parquet", rows)
    assert read(tmp_path / "rows.parquet") == rows == rows_from_json(json.loads(rows_to_text(rows)))


@pytest.mark.parametrize("rows", [[], [SPARE]], ids=["none", "only nulls in some columns"])
def test_columns_have_the_types_of_their_fields_whatever_is_in_them(tmp_path, rows):
    write_parquet(tmp_path / "full", [ROW])
    write_parquet(tmp_path / "other", rows)
    full, other = (pq.read_schema(tmp_path / name) for name in ("full", "other"))
    assert full.equals(other)
    assert str(other.field("budget").type) == "double"
    assert other.field("budget").nullable
    assert not other.field("task").nullable


def test_a_run_writes_both_and_restores_a_lost_one(ppl_command):
    from rich.console import Console

    command = ppl_command(methods=("lsh",), documents=2)
    found = ppl.run(command, Console(quiet=True))
    path = command.out / "rows.parquet"
    assert read(path) == found.rows == rows_from_json(json.loads((command.out / "rows.json").read_text()))
    path.unlink()
    assert ppl.run(command, Console(quiet=True)) == found
    assert read(path) == found.rows


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    write_parquet(path, [ROW])

    def fail(table, target, **options):
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        write_parquet(path, [SPARE])
    assert read(path) == [ROW]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.parquet"]
