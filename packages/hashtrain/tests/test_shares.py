"""Texts larger than a run can use are read in part: in bounded memory, evenly, and reproducibly."""

import json
import os
import subprocess
import sys
import time
import tracemalloc

import pytest
from hashtrain.data.corpus import contexts, read_texts
from hashtrain.data.manifest import _whole, checksum
from hashtrain.data.shares import LEAST, PART, Span, room_for, shares
from hashtrain.data.texts import Document, require_apart
from hashtrain.data.token_contexts import in_turn
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
    assert list(in_turn([[1, 2, 3], [10], [None, 0]])) == [1, 10, None, 2, 0, 3]
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


def large_text(folder, gigabytes):
    """Make so much text on a hundredth of the disk: one file with a single line, and 99 links to it."""
    folder.mkdir()
    piece = " ".join(f"{WORDS}{n}" for n in range(20_000))
    with (folder / "0.txt").open("w") as file:
        for _ in range(gigabytes * 10 * MIB // len(piece) + 1):
            file.write(piece)
    for number in range(1, 100):
        os.link(folder / "0.txt", folder / f"{number}.txt")
    assert sum(p.stat().st_size for p in folder.iterdir()) >= gigabytes * 1_000 * MIB


TRAINING = """
import json, os, resource, sys, threading, time
from pathlib import Path
from hashtrain.cli import main
out = Path(sys.argv[1])

def until_the_first_line():
    while not (out / "metrics.jsonl").is_file() or not (out / "metrics.jsonl").read_text():
        time.sleep(0.05)
    used = resource.getrusage(resource.RUSAGE_SELF)
    # Not ru_maxrss, which a process has from the one that started it.
    most = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"seconds": used.ru_utime + used.ru_stime, "bytes": 1024 * int(most.split()[1])}), flush=True)
    os._exit(0)

threading.Thread(target=until_the_first_line, daemon=True).start()
main(sys.argv[2:])
"""
MODEL_AND_TORCH = 900 * MIB
"""What the process takes without texts: torch, transformers, the demo model in float32 and its logits."""


@pytest.mark.parametrize(
    "gigabytes", [pytest.param(1, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.full)]
)
def test_a_training_on_much_text_takes_its_first_step_within_a_minute(gigabytes, tmp_path):
    """With the paper's number of contexts, by processor time, so that other work on the machine does not count."""
    large_text(tmp_path / "large", gigabytes)
    held = tmp_path / "held.txt"
    held.write_text("\n".join(f"held out, as no other: {n} {n * n}" for n in range(100_000)))
    words = ["--text", str(tmp_path / "large"), "--held-out-text", str(held), "--contexts", "8192", "--workers", "1"]
    words += ["--stream", "--only", "paper-exact", "--steps", "8192", "--held-out", "2", "--out", str(tmp_path / "run")]
    found = []
    for _ in range(2):
        started = subprocess.run(
            [sys.executable, "-c", TRAINING, str(tmp_path / "run"), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=3000,
        )
        found.append(json.loads(started.stdout.splitlines()[-1]))
        (tmp_path / "run" / "metrics.jsonl").unlink()
    assert found[0]["seconds"] < 60, found
    assert found[1]["seconds"] < found[0]["seconds"], found  # texts and weights are known
    assert max(one["bytes"] for one in found) < MODEL_AND_TORCH + 2_000 * MIB, found


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
