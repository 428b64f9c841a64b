"""Texts larger than a run can use are read in part: in bounded memory, evenly, and reproducibly."""

import os
import subprocess
import sys
import time
import tracemalloc

import pytest
from hashtrain.data.corpus import contexts, in_turn, read_texts
from hashtrain.data.manifest import _whole, checksum
from hashtrain.data.shares import LEAST, room_for, shares
from hashtrain.data.texts import Document, require_apart
from hashtrain.demo import demo_model_path
from transformers import AutoTokenizer

MIB = 1 << 20
WORDS = "a line of some length that no other has, number "


def test_what_fits_is_read_whole_and_in_order(tmp_path):
    files = [tmp_path / f"{n}.txt" for n in range(3)]
    for file in files:
        file.write_text("x" * 100)
    assert shares(files, None) == shares(files, 300) == [(file, None) for file in files]


def test_what_does_not_fit_is_drawn_and_read_in_part(tmp_path):
    files = [tmp_path / f"{n}.txt" for n in range(8)]
    for file in files:
        file.touch()
        os.truncate(file, 3 * MIB)
    few = shares(files, 4 * MIB, seed=1)
    assert len(few) == 4
    assert {most for _, most in few} == {LEAST}
    assert few == shares(files, 4 * MIB, seed=1) != shares(files, 4 * MIB, seed=2)
    assert sum(most or 3 * MIB for _, most in shares(files, 16 * MIB)) == 16 * MIB
    files[0].write_text("small")  # read whole, whenever it is drawn
    assert dict(shares(files, 16 * MIB)).get(files[0]) is None
    assert room_for(1) == 64 * MIB
    assert room_for(1 << 26) == 8 << 26


def test_a_part_ends_before_a_character_that_it_cuts(tmp_path):
    (tmp_path / "long.txt").write_text("ä" * MIB, encoding="utf-8")  # two bytes each
    (found,) = read_texts([tmp_path / "long.txt"], room=MIB + 1)
    assert found.text == "ä" * (MIB // 2)
    (tmp_path / "bad.txt").write_bytes(b"\xff" + b"x" * 3 * MIB)
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_texts([tmp_path / "bad.txt"], room=MIB)


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
    assert list(in_turn([[1, 2, 3], [10], [None, 0]])) == [1, 10, None, 2, 0, 3]
    alone = [Document("long", long), Document("other", long)]
    again = [Document("long", long, 7), Document("other", long, 7)]  # one corpus: unchanged order
    assert all((a == b).all() for a, b in zip(*(contexts(d, tokenizer, 128, 8) for d in (alone, again)), strict=True))


@pytest.mark.parametrize("unit", ["word ", "x"])
def test_of_a_long_line_no_more_is_read_than_there_is_room_for(unit, tmp_path):
    """The same with 200 MB, and 20 GB, is below."""
    (tmp_path / "line.txt").write_text(unit * (16 * MIB // len(unit)))
    tracemalloc.start()
    began = time.monotonic()
    (found,) = read_texts([tmp_path / "line.txt"], room=MIB)
    require_apart([found], [Document("held out", "another text\n" * 9)])
    most, seconds = tracemalloc.get_traced_memory()[1], time.monotonic() - began
    tracemalloc.stop()
    assert len(found.text) == MIB
    assert most < 5 * MIB
    assert seconds < 5


CHILD = """
import resource, sys, time
from pathlib import Path
from transformers import AutoTokenizer
from hashtrain.data.corpus import contexts, read_texts
from hashtrain.demo import demo_model_path
from hashtrain.data.shares import room_for
tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
contexts(read_texts([Path(sys.argv[1]) / "warm.txt"]), tokenizer, 256, 1)
for text in ("large/0.txt", "large"):
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    found = contexts(read_texts([Path(sys.argv[1]) / text], room=room_for(8 * 4096)), tokenizer, 4096, 8)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(len(found), (after - before) * 1024, time.monotonic() - began)
"""


@pytest.mark.slow
def test_twenty_gigabytes_and_a_line_of_200_mb_are_read_in_bounded_memory(tmp_path):
    """One file with a single line, and a folder of a hundred links to it: 20 GB if everything is read."""
    large = tmp_path / "large"
    large.mkdir()
    (tmp_path / "warm.txt").write_text(WORDS * 200)
    piece = " ".join(f"{WORDS}{n}" for n in range(20_000))
    with (large / "0.txt").open("w") as file:
        for _ in range(200 * MIB // len(piece) + 1):
            file.write(piece)
    for number in range(1, 100):
        os.link(large / "0.txt", large / f"{number}.txt")
    assert sum(p.stat().st_size for p in large.iterdir()) >= 20_000 * MIB
    words = [sys.executable, "-c", CHILD, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    for line in done.stdout.splitlines():
        count, taken, seconds = map(float, line.split())
        assert count == 8
        assert taken < 500 * MIB, f"{taken / MIB:.0f} MiB"
        assert seconds < 60


def test_a_file_that_was_not_touched_is_not_read_again(tmp_path, monkeypatch):
    path = tmp_path / "00000.safetensors"
    path.write_bytes(b"some bytes")
    recorded = {path.name: checksum(path)}
    monkeypatch.setattr("hashtrain.data.manifest.checksum", lambda path: pytest.fail("it was read"))
    assert _whole(path, recorded)
    assert not _whole(tmp_path / "00001.safetensors", recorded)
    monkeypatch.undo()
    later = time.time_ns() + 10**9
    os.utime(path, ns=(later, later))  # as after copying: read again, and found to be equal
    assert _whole(path, recorded)
    path.write_bytes(b"some bytes.")
    assert not _whole(path, recorded)
    path.write_bytes(b"other byte")
    os.utime(path, ns=(later, later))
    assert not _whole(path, recorded)
