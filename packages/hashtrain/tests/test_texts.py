"""Tables and data sets give documents or one sentence, with the real loader on small local files."""

import json
from pathlib import Path

import pytest
from hashtrain.data import texts
from hashtrain.data.corpus import read_texts

pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
import pyarrow as pa
import pyarrow.parquet as pq


def rows_to(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("field", ["text", "content", "code"])
def test_tables_give_a_document_a_row(tmp_path, ending, field):
    rows = [{"id": 1, field: "first\ntext"}, {"id": 2, field: ""}, {"id": 3, field: "third"}]
    found = read_texts([rows_to(tmp_path / f"table.{ending}", rows)])
    assert [d.text for d in found] == ["first\ntext", "third"]
    assert found[1].name == f"table.{ending}, row 3"


def test_a_long_table_is_read_as_far_as_it_is_needed(tmp_path):
    path = rows_to(tmp_path / "table.jsonl", [{"text": str(number)} for number in range(100)])
    assert [d.text for d in read_texts([path], at_most=3)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "no text found"),
        ("blank.txt", b" \n\n", "no text found"),
        ("empty.jsonl", b"", "is empty"),
        ("picture.txt", b"\x89PNG\0\1", "is binary: expected UTF-8 text, got a zero byte at 4"),
        ("broken.jsonl", b'{"text": "whole"}\n{"text": ', "cannot be read"),
        ("other.jsonl", b'{"id": 1, "title": "x"}\n', "row 1: expected a string in the field text or content or code"),
        ("numbers.jsonl", b'{"text": 1}\n', "expected a string in the field"),
        ("broken.parquet", b"PAR1 and nothing else", "cannot be read"),
    ],
)
def test_files_that_hold_no_text_are_one_sentence(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_texts([tmp_path / name])
    assert "\n" not in str(raised.value)


def test_hub_ids_are_streamed_by_the_real_loader(tmp_path, monkeypatch):
    """The data set is a folder here, which `datasets` treats like a Hub id, without the download."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    rows_to(tmp_path / "owner" / "name" / "train.parquet", [{"body": "one"}, {"body": "two"}])
    assert [d.text for d in read_texts([Path("hub:owner/name:train:body")])] == ["one", "two"]
    with pytest.raises(ValueError, match="the data set owner/name, split test cannot be read"):
        read_texts([Path("hub:owner/name:test:body")])
    remedy = r"; give a local \.jsonl or \.txt file to --text$"
    with pytest.raises(ValueError, match=f"the data set nobody/nothing, split train cannot be read: .*{remedy}"):
        read_texts([Path("hub:nobody/nothing")])
    with pytest.raises(ValueError, match=f"hub:nobody/nothing/some.jsonl cannot be read: .*{remedy}"):
        read_texts([Path("hub:nobody/nothing/some.jsonl")])
    for wrong, said in (("hub:pg19", "expected hub:OWNER/NAME"), ("hub:a/b/c.txt", "expected a file ending in .jsonl")):
        with pytest.raises(ValueError, match=said):
            read_texts([Path(wrong)])


def test_rows_of_the_hub_that_fail_on_the_way_name_the_remedy(monkeypatch):
    def broken():
        yield {"text": "one"}
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(texts, "_stream", lambda *given, **how: broken())
    with pytest.raises(
        ValueError, match=r"hub:owner/name cannot be read: no route.*; give a local \.jsonl or \.txt file"
    ):
        read_texts([Path("hub:owner/name")])


@pytest.mark.parametrize(
    ("path", "hinted"),
    [("owner/name", True), ("texts/one.txt", False), ("a/b/c", False), ("name", False), ("../x", False)],
)
def test_the_error_suggests_the_hub_for_a_path_like_a_hub_id(tmp_path, monkeypatch, path, hinted):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="text file not found") as raised:
        read_texts([Path(path)])
    assert str(raised.value).endswith(f", or hub:{path} for the data set on the Hub") == hinted
