"""Texts larger than a run can use are read in part: in bounded memory, evenly, and reproducibly."""

import os
import time
import tracemalloc

import pytest
from hashtrain.data.corpus import contexts, read_texts
from hashtrain.data.shares import LEAST, PART, Span, room_for, shares
from hashtrain.data.texts import Document, require_apart
from hashtrain.demo import demo_model_path
from transformers import AutoTokenizer

MIB = 1 << 20
WORDS = "a line of some length that no other has, number "


def test_what_fits_is_read_whole_and_in_order(tmp_path):
    files = [tmp_path / f"{n}.txt" for n in range(3)]
    for file in files:
        file.write_text("x" * 100)
    assert shares(files, None) == shares(files, 300) == [Span(file) for file in files]


def test_what_does_not_fit_is_drawn_and_read_in_part(tmp_path):
    files = [tmp_path / f"{n}.txt" for n in range(8)]
    for file in files:
        file.touch()
        os.truncate(file, 3 * MIB)
    few = shares(files, 4 * MIB, seed=1)
    assert len({span.file for span in few}) == 4
    assert sum(span.size for span in few) == 4 * LEAST
    assert few == shares(files, 4 * MIB, seed=1) != shares(files, 4 * MIB, seed=2)
    assert sum(span.size for span in shares(files, 16 * MIB)) == 16 * MIB
    files[0].write_text("small")  # read whole, whenever it is drawn
    assert Span(files[0]) in shares(files, 16 * MIB)
    assert room_for(1) == 64 * MIB
    assert room_for(1 << 26) == 8 << 26


@pytest.mark.parametrize(
    ("size", "room"), [(100 * MIB, 5 * MIB), (100 * MIB + 7, 99 * MIB + 3), (3 * MIB, 2 * MIB + 1)]
)
def test_a_large_file_is_read_in_parts_over_its_whole_length(size, room, tmp_path):
    (tmp_path / "one.txt").touch()
    os.truncate(tmp_path / "one.txt", size)
    found = shares([tmp_path / "one.txt"], room)
    assert len(found) == room // PART
    assert room - len(found) < sum(span.size for span in found) <= room
    ends = [span.start + span.size for span in found]
    assert all(end <= span.start for end, span in zip(ends, found[1:], strict=False))
    assert found[0].start == 0
    assert size - size / len(found) - 1 <= found[-1].start
    assert ends[-1] <= size
    assert shares([tmp_path / "one.txt"], room, in_order=lambda file: True) == [Span(tmp_path / "one.txt", 0, room)]


def test_a_part_ends_before_a_character_that_it_cuts(tmp_path):
    (tmp_path / "long.txt").write_text("ä" * MIB, encoding="utf-8")  # two bytes each
    found = read_texts([tmp_path / "long.txt"], room=MIB + 1)
    assert len(found) == MIB // PART
    assert all(set(document.text) == {"ä"} and len(document.text) == PART // 2 for document in found)
    (tmp_path / "bad.txt").write_bytes(b"\xff" + b"x" * 3 * MIB)
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_texts([tmp_path / "bad.txt"], room=MIB)


@pytest.mark.parametrize("character", ["ä", "€", "😀"])
def test_a_part_begins_after_a_character_that_it_cuts(character, tmp_path):
    width = len(character.encode())
    (tmp_path / "long.txt").write_text("x" + character * (4 * MIB // width), encoding="utf-8")
    found = read_texts([tmp_path / "long.txt"], room=3 * MIB)
    assert [document.name for document in found][1:] == [f"long.txt, from byte {s.start}" for s in _spans(tmp_path)[1:]]
    assert all(set(document.text) <= {"x", character} for document in found)
    assert all(len(document.text) >= PART // width - 2 for document in found)
    bad = _spans(tmp_path)[1].start + 100
    with (tmp_path / "long.txt").open("r+b") as file:
        file.seek(bad)
        file.write(b"\xff")
    first = bad - (bad - 1) % width  # of the character that was hit; the x is before all
    with pytest.raises(ValueError, match=f"not UTF-8 text: byte {first} "):
        read_texts([tmp_path / "long.txt"], room=3 * MIB)


def _spans(folder):
    return shares([folder / "long.txt"], 3 * MIB)


def test_each_path_gets_as_much_room(tmp_path):
    for name, letter in (("one", "a"), ("two", "b")):
        (tmp_path / name).mkdir()
        for number in range(8):
            (tmp_path / name / f"{number}.txt").write_text(letter * MIB)
    found = read_texts([tmp_path / "one", tmp_path / "two"], room=6 * MIB)
    assert [(d.corpus, d.text[0]) for d in found] == [(0, "a")] * 3 + [(1, "b")] * 3


def test_corpora_give_contexts_in_turn():
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    long, short = "first corpus " * 4000, "second one "
    documents = [Document("long", long, 0), *(Document(f"{n}", short * 300, 1) for n in range(3))]
    found = [tokenizer.decode(ids)[:40] for ids in contexts(documents, tokenizer, 128, 8)]
    assert sum("first" in text for text in found[:2]) == 1
    assert sum("first" in text for text in found) in (3, 4, 5)
    alone = [Document("long", long), Document("other", long)]
    again = [Document("long", long, 7), Document("other", long, 7)]  # one corpus: unchanged order
    assert all((a == b).all() for a, b in zip(*(contexts(d, tokenizer, 128, 8) for d in (alone, again)), strict=True))


@pytest.mark.parametrize("unit", ["word ", "x"])
def test_of_a_long_line_no_more_is_read_than_there_is_room_for(unit, tmp_path):
    """A whole training on 20 GB is below."""
    (tmp_path / "line.txt").write_text(unit * (16 * MIB // len(unit)))
    tracemalloc.start()
    began = time.monotonic()
    found = read_texts([tmp_path / "line.txt"], room=MIB)
    require_apart(found, [Document("held out", "another text\n" * 9)])
    most, seconds = tracemalloc.get_traced_memory()[1], time.monotonic() - began
    tracemalloc.stop()
    assert sum(len(document.text) for document in found) == MIB
    assert most < 5 * MIB
    assert seconds < 5
