"""Texts larger than a run can use are read in part: in bounded memory, and reproducibly."""

import os

from hashtrain.data.corpus import contexts, read_texts
from hashtrain.data.shares import LEAST, room_for, shares
from hashtrain.data.texts import Document
from hashtrain.demo import demo_model_path
from transformers import AutoTokenizer

MIB = 1 << 20


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


def test_corpora_give_contexts_in_turn():
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    long, short = "first corpus " * 4000, "second one "
    documents = [Document("long", long, 0), *(Document(f"{n}", short * 300, 1) for n in range(3))]
    found = [tokenizer.decode(ids)[:40] for ids in contexts(documents, tokenizer, 128, 8)]
    assert sum("first" in text for text in found[:2]) == 1
    assert sum("first" in text for text in found) in (3, 4, 5)
