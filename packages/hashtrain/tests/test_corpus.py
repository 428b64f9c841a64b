"""Texts are read whole or as far as needed, held-out text is never trained on, unusable text is one sentence."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hashtrain.data import corpus, texts
from hashtrain.data.corpus import Document, contexts, far_contexts, held_out_sources, python_sources, split, token_ids
from hashtrain.data.texts import LEAST, apart, read_texts, room_for, shares
from hashtrain.run.prepare import _texts
from hashtrain.run.settings import TrainCommand
from hashtrain.usage import UsageError

MIB = 1 << 20


def letters(text, **kwargs):
    if isinstance(text, list):
        return SimpleNamespace(input_ids=[[ord(c) for c in one] for one in text])
    return SimpleNamespace(input_ids=[ord(c) for c in text])


@pytest.fixture
def table(tmp_path):
    """Return a function that writes rows to a file of that name, which the real loader reads."""
    pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    import pyarrow as pa
    import pyarrow.parquet as pq

    def written(name, rows):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return written


# ---- Reading --------------------------------------------------------------------------------------------------------


def test_only_texts_of_a_folder_are_read(tmp_path):
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "two.md").write_text("two")
    (tmp_path / "deep" / "picture.png").write_bytes(b"\xff\xfe")
    (tmp_path / "notes.md").mkdir()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "round.txt").symlink_to(tmp_path / "round.txt")
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.txt")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert [document.text for document in read_texts([tmp_path])] == ["two", "one"]
    for name, kind in (("pipe.txt", "a pipe"), ("pipe.jsonl", "a pipe"), ("endless.txt", "a device")):
        with pytest.raises(UsageError, match=f"{name} is {kind}, expected a regular file"):
            read_texts([tmp_path / name])


@pytest.mark.parametrize(("ending", "field"), [("jsonl", "text"), ("jsonl", "code"), ("parquet", "content")])
def test_tables_give_a_document_a_row(table, ending, field):
    path = table(f"table.{ending}", [{"id": 1, field: "first\ntext"}, {"id": 2, field: ""}, {"id": 3, field: "third"}])
    found = read_texts([path])
    assert [d.text for d in found] == ["first\ntext", "third"]
    assert found[1].name == f"table.{ending}, row 3"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("blank.txt", b" \n\n", r"no text found in .*blank\.txt"),
        ("empty.jsonl", b"", "is empty"),
        ("latin.txt", b"caf\xe9", "not UTF-8 text: byte 3"),
        ("picture.txt", b"\x89PNG\0\1", "is binary: expected UTF-8 text, got a zero byte at 4"),
        ("broken.jsonl", b'{"text": "whole"}\n{"text": ', "cannot be read"),
        ("other.jsonl", b'{"id": 1, "title": "x"}\n', "row 1: expected a string in the field text or content or code"),
        ("numbers.jsonl", b'{"text": 1}\n', "expected a string in the field"),
        ("broken.parquet", b"PAR1 and nothing else", "cannot be read"),
        ("deep.jsonl", b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}", "cannot be read"),
    ],
)
def test_files_that_hold_no_text_are_one_sentence(tmp_path, table, name, content, message):
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_texts([tmp_path / "one.txt", tmp_path / name])
    assert "\n" not in str(raised.value)


def test_texts_that_cannot_be_used_are_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no text found in .*empty: expected .* more than white space"):
        read_texts([tmp_path / "empty"])
    (tmp_path / "one.txt").write_text("one")
    for twice in ([tmp_path / "one.txt"] * 2, [tmp_path / "empty" / ".." / "one.txt", tmp_path / "one.txt"]):
        with pytest.raises(ValueError, match=r"one\.txt is given twice, by .*: name each text once"):
            read_texts(twice)
    with pytest.raises(ValueError, match="no text in the last fifth of one: expected more than white space"):
        split([Document("one", "words" + " " * 100)])


def test_hub_ids_are_streamed_by_the_real_loader(tmp_path, table, monkeypatch):
    """The data set is a folder here, which `datasets` treats like a Hub id, without the download."""
    monkeypatch.chdir(tmp_path)
    table("owner/name/train.parquet", [{"body": "one"}, {"body": "two"}])
    assert [d.text for d in read_texts([Path("hub:owner/name:train:body")])] == ["one", "two"]
    remedy = r"cannot be read: .*; give a local \.jsonl or \.txt file to --text$"
    for wrong, said in (
        ("hub:owner/name:test:body", "hub:owner/name:test:body cannot be read"),
        ("hub:nobody/nothing", f"hub:nobody/nothing {remedy}"),
        ("hub:nobody/nothing/some.jsonl", f"hub:nobody/nothing/some.jsonl {remedy}"),
        ("hub:pg19", "expected hub:OWNER/NAME"),
        ("hub:a/b/c.txt", "expected a file ending in .jsonl"),
    ):
        with pytest.raises(ValueError, match=said):
            read_texts([Path(wrong)])
    for wrong, hinted in (("owner/none", True), ("texts/one.txt", False), ("a/b/c", False), ("../x", False)):
        with pytest.raises(ValueError, match="text file not found") as raised:
            read_texts([Path(wrong)])
        assert str(raised.value).endswith(f", or hub:{wrong} for the data set on the Hub") == hinted

    def broken():
        yield {"text": "one"}
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(texts, "_stream", lambda *given, **how: broken())
    with pytest.raises(ValueError, match=r"hub:owner/name cannot be read: no route.*; give a local \.jsonl or \.txt"):
        read_texts([Path("hub:owner/name")])


def test_what_fits_is_read_whole_and_the_rest_is_drawn(tmp_path):
    files = [tmp_path / f"{n}.txt" for n in range(8)]
    for file in files:
        file.touch()
        os.truncate(file, 3 * MIB)
    assert shares(files, None) == shares(files, 24 * MIB) == dict.fromkeys(files)
    few = shares(files, 4 * MIB, seed=1)
    assert list(few.values()) == [LEAST] * 4
    assert few == shares(files, 4 * MIB, seed=1) != shares(files, 4 * MIB, seed=2)
    assert sum(shares(files, 16 * MIB).values()) == 16 * MIB
    files[0].write_text("small")
    assert shares(files, 16 * MIB)[files[0]] is None
    assert (room_for(1), room_for(1 << 26)) == (64 * MIB, 8 << 26)


def test_a_part_ends_before_a_character_that_it_cuts_and_each_path_gets_as_much_room(tmp_path):
    for name, letter in (("one", "ä"), ("two", "x")):
        (tmp_path / f"{name}.txt").write_text(letter * 4 * MIB, encoding="utf-8")
    found = read_texts([tmp_path / "one.txt", tmp_path / "two.txt"], room=2 * MIB + 2)
    assert [(d.corpus, set(d.text), len(d.text)) for d in found] == [(0, {"ä"}, MIB // 2), (1, {"x"}, MIB + 1)]


# ---- Contexts -------------------------------------------------------------------------------------------------------


def test_contexts_take_the_start_of_each_document_before_second_pieces():
    documents = [Document("a", "a" * 35), Document("b", "b" * 22), Document("c", "c" * 5)]
    cut = contexts(documents, letters, 10, 10, seed=None)
    assert [chr(c[0]) for c in cut] == ["a", "b", "a", "b", "a"]
    assert all(c.shape == (10,) and c.dtype == torch.int64 for c in cut)
    assert len(contexts(documents, letters, 10, 2, seed=None)) == 2
    with pytest.raises(ValueError, match=r"shorter than the context: expected at least 10 tokens.*got at most 5"):
        contexts(documents[2:], letters, 10, 3)


def test_contexts_begin_with_the_start_token_if_texts_do():
    class Marking:
        bos_token_id = 1

        def __call__(self, text, add_special_tokens=True, **kwargs):
            return SimpleNamespace(input_ids=[1] * add_special_tokens + [*text.encode()])

    cut = contexts([Document("a", "abcde")], Marking(), 3, 9)
    assert [context.tolist() for context in cut] == [[1, 97, 98], [1, 99, 100]]
    assert [far.tolist() for far in far_contexts([], Marking(), cut, 6, 0)] == [[1, 97, 98, 99, 100]]


def test_corpora_give_contexts_in_turn():
    documents = [Document("long", "a" * 4000, 0), *(Document(f"{n}", "b" * 300, 1) for n in range(9))]
    found = "".join(chr(ids[0]) for ids in contexts(documents, letters, 128, 8))
    assert found == "abababab"  # one long document gives as many as nine short ones


@pytest.mark.parametrize("unit", ["word\n", "word ", "x"])
def test_a_long_text_is_tokenised_in_parts_and_only_as_far_as_needed(unit, monkeypatch):
    monkeypatch.setattr(corpus, "_PART", 1024)
    text, seen = (unit * 4096)[: 3 * 1024 + 5], []

    def counted(part, **settings):
        seen.append(part)
        return letters(part, **settings)

    ids = token_ids(text, counted)
    assert torch.equal(ids, torch.tensor([ord(letter) for letter in text]))
    assert "".join(seen) == text
    assert (len(seen), max(map(len, seen)) <= 1024) == (4, True)
    seen.clear()
    assert len(contexts([Document("long", text)], counted, 100, 3)) == 3
    assert len(seen) == 1


def test_no_held_out_module_is_ever_trained_on():
    validation, train = held_out_sources(), python_sources()
    assert len(validation) >= 20
    assert len(train) >= 300
    assert not {d.name for d in train} & {*corpus.HELD_OUT, *corpus.NEVER_READ}
    assert not {d.text for d in train} & {d.text for d in validation}


def test_a_readers_text_is_split_without_overlap_and_refused_if_it_repeats_itself():
    train, validation = split([Document(str(i), "x") for i in range(7)])
    assert not {d.name for d in train} & {d.name for d in validation}
    assert len(train) + len(validation) == 7
    (one, *parts), (end, other) = split([Document("one", "0123456789"), *(Document(str(i), "x", 1) for i in range(5))])
    assert one.text + end.text == "0123456789"
    assert [part.corpus for part in (one, *parts, end, other)] == [0, 1, 1, 1, 1, 0, 1]
    for passage in ("The same sentence, over and over again. ", "A line, over and over again.\n", "ab "):
        parts = split([Document("one", passage * 500)])
        with pytest.raises(ValueError, match="held-out part of one is also in what is trained on: it repeats itself"):
            apart(*parts)


def test_training_text_that_holds_the_held_out_text_leaves_or_is_refused():
    lines = [f"a long enough line of prose, the number {number}" for number in range(20)]
    validation = [Document("validation", "\n".join(lines)), Document("short", "one line")]
    other = [Document("other", "\n".join(x.upper() for x in lines)), Document("quotes", "\n".join(lines[:9]))]
    for copy in ("# a header\n" + "\n".join(lines), "\n".join(lines[:11]), " one line\n"):
        for name in ("copy", "validation"):  # vendored files keep their names
            assert apart([*other, Document(name, copy)], validation) == apart(other, validation, given=True) == other
        with pytest.raises(ValueError, match="copy holds most of the held-out text"):
            apart([*other, Document("copy", copy)], validation, given=True)
        with pytest.raises(ValueError, match="each training text"):
            apart([Document("copy", copy)], validation)


def test_a_file_that_is_trained_on_and_held_out_is_named(tmp_path):
    (tmp_path / "my.txt").write_text("A sentence that is no other's. " * 90)
    both = TrainCommand(text=(tmp_path / "my.txt",), held_out_text=(tmp_path / "my.txt",), context=512)
    with pytest.raises(ValueError, match=r"^my\.txt is in what is trained on and in --held-out-text: "):
        _texts(both, letters, 0)


def test_contexts_of_calibration_are_as_long_as_the_reach():
    """Parts of long documents, or contexts of training one behind the other."""
    found = [torch.full((64,), number) for number in range(5)]
    long, short = Document("long", "0123456789" * 200), Document("short", "abc" * 20)
    for reach, wanted in ((128, 128), (200, 200), (1 << 20, 512)):
        cut = [bytes(one.tolist()).decode() for one in far_contexts([short, long], letters, found, reach, 0)]
        assert cut == [long.text[n * wanted : (n + 1) * wanted] for n in range(3)]
    both = [one.tolist() for one in far_contexts([short], letters, found, 210, 0)]
    assert both == [[first + at // 64 for at in range(3 * 64)] for first in (0, 1, 2)]
    assert [len(one) for one in far_contexts([], letters, found, 1 << 20, 0)] == [320]
    few = far_contexts([Document("long", "0123456789" * 103)], letters, found, 512, 0)
    assert [(len(one), int(one[0])) for one in few] == [(512, ord("0")), (512, ord("2")), (320, 0)]
    assert far_contexts([long], letters, found, 127, 0) == far_contexts([short], letters, found[:1], 512, 0) == []
