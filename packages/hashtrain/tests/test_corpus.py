"""Held-out text is never trained on, and unusable text is rejected with one sentence."""

import os
from types import SimpleNamespace

import pytest
import torch
from hashtrain.data import corpus
from hashtrain.data.corpus import (
    HELD_OUT,
    HELD_OUT_TABLES,
    Document,
    _mostly_in,
    contexts,
    held_out_sources,
    python_sources,
    read_texts,
    split,
    token_ids,
)
from hashtrain.data.texts import long_lines, require_apart
from hashtrain.usage import UsageError


def letters(text, **kwargs):
    if isinstance(text, list):
        return SimpleNamespace(input_ids=[[ord(c) for c in one] for one in text])
    return SimpleNamespace(input_ids=[ord(c) for c in text])


def test_no_held_out_module_is_ever_trained_on():
    validation, train = held_out_sources(), python_sources()
    assert len(validation) >= 20
    assert len(train) >= 300
    names = {d.name for d in train}
    assert not names & {*HELD_OUT, *HELD_OUT_TABLES}
    texts = {d.text for d in train}
    assert not any(d.text in texts for d in validation)


def test_a_vendored_copy_of_a_held_out_module_counts_as_held_out():
    document = held_out_sources()[0]
    lines = set(long_lines(document.text))
    assert _mostly_in("# another licence header above it all\n" + document.text, lines)
    assert not _mostly_in(held_out_sources()[1].text, lines)


def test_contexts_take_the_start_of_each_document_before_second_pieces():
    documents = [Document("a", "a" * 25), Document("b", "b" * 12), Document("c", "c" * 5)]
    cut = contexts(documents, letters, 10, 10, seed=None)
    assert [chr(c[0]) for c in cut] == ["a", "b", "a"]
    assert all(c.shape == (10,) and c.dtype == torch.int64 for c in cut)
    assert len(contexts(documents, letters, 10, 2, seed=None)) == 2


def test_only_files_of_a_folder_are_read(tmp_path):
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "notes.md").mkdir()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "round.txt").symlink_to(tmp_path / "round.txt")
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.txt")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert [document.name for document in read_texts([tmp_path])] == ["one.txt"]
    for name, kind in (("pipe.txt", "a pipe"), ("pipe.jsonl", "a pipe"), ("endless.txt", "a device")):
        with pytest.raises(UsageError, match=f"{name} is {kind}, expected a regular file"):
            read_texts([tmp_path / name])


@pytest.mark.parametrize(("unit", "parts"), [("word\n", 4), ("word ", 4), ("x", 4)])
def test_a_long_text_is_tokenised_in_parts_and_only_as_far_as_needed(unit, parts, monkeypatch):
    monkeypatch.setattr(corpus, "_PART", 1024)
    text, seen = (unit * 4096)[: 3 * 1024 + 5], []

    def counted(part, **settings):
        seen.append(part)
        return letters(part, **settings)

    ids = token_ids(text, counted)
    assert torch.equal(ids, torch.tensor([ord(letter) for letter in text]))
    assert "".join(seen) == text
    assert max(map(len, seen)) <= 1024
    assert len(seen) == parts
    seen.clear()
    assert len(contexts([Document("long", text)], counted, 100, 3)) == 3
    assert len(seen) == 1


def test_texts_tokenised_together_have_the_tokens_of_each_alone(monkeypatch):
    monkeypatch.setattr(corpus, "_PART", 64)
    texts, lists = ["word " * 50, "", "x" * 200, "a line\n" * 30], []

    def noted(text, **settings):
        lists.append(isinstance(text, list))
        return letters(text, **settings)

    found = corpus._tokenised(texts, noted, 10_000)
    assert lists == [True]
    assert all(torch.equal(ids, token_ids(text, letters)) for ids, text in zip(found, texts, strict=True))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x0b", "\u2028"])
def test_long_lines_are_those_of_a_text_or_the_sentences_of_one_line(end):
    line, other = "a" * 31, "b" * 33
    assert list(long_lines(f"{line}{end} {other} {end}short")) == [line, other]
    assert list(long_lines(f"{line}. {other}. c{end}")) == [line, other]


def test_text_shorter_than_the_context_is_refused():
    with pytest.raises(ValueError, match=r"shorter than the context: expected at least 10 tokens.*got at most 5"):
        contexts([Document("c", "c" * 5)], letters, 10, 3)


def test_text_files_are_read_from_files_and_folders(tmp_path):
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "two.md").write_text("two")
    (tmp_path / "deep" / "picture.png").write_bytes(b"\xff\xfe")
    assert [d.text for d in read_texts([tmp_path])] == ["two", "one"]


def test_text_that_cannot_be_used_is_one_sentence(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="not UTF-8 text: byte 3"):
        read_texts([tmp_path / "latin.txt"])
    with pytest.raises(ValueError, match="not found"):
        read_texts([tmp_path / "none.txt"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no text found in .*empty: expected .* more than white space"):
        read_texts([tmp_path / "empty"])
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "spaces.txt").write_text(" \n" * 99)
    with pytest.raises(ValueError, match=r"no text found in .*spaces\.txt"):
        read_texts([tmp_path / "one.txt", tmp_path / "spaces.txt"])
    for twice in ([tmp_path / "one.txt"] * 2, [tmp_path / "empty" / ".." / "one.txt", tmp_path / "one.txt"]):
        with pytest.raises(ValueError, match=r"one\.txt is given twice, by .*: name each text once"):
            read_texts(twice)
    with pytest.raises(ValueError, match="no text in the last fifth of one: expected more than white space"):
        split([Document("one", "words" + " " * 100)])


@pytest.mark.parametrize(
    "passage", ["The same sentence, over and over again. ", "A line, over and over again.\n", "ab "]
)
def test_a_text_that_repeats_itself_is_refused_by_what_it_is(passage):
    train, held = split([Document("one", passage * 500)])
    with pytest.raises(ValueError, match="the held-out part of one is also in what is trained on: it repeats itself"):
        require_apart(train, held)


def test_a_readers_text_is_split_without_overlap():
    many = [Document(str(i), "x") for i in range(7)]
    train, validation = split(many)
    assert not {d.name for d in train} & {d.name for d in validation}
    assert len(train) + len(validation) == 7
    (train,), (validation,) = split([Document("one", "0123456789")])
    assert train.text + validation.text == "0123456789"


def test_training_text_that_holds_the_held_out_text_is_refused():
    lines = [f"a long enough line of prose, the number {number}" for number in range(20)]
    validation = [Document("validation", "\n".join(lines)), Document("short", "one line")]
    require_apart([Document("other", "\n".join(line.upper() for line in lines))], validation)
    require_apart([Document("quotes", "\n".join(lines[:9]))], validation)
    for copy in ("# a header\n" + "\n".join(lines), "\n".join(lines[:11]), " one line\n"):
        with pytest.raises(ValueError, match="copy holds most of the held-out text"):
            require_apart([Document("fine", "x"), Document("copy", copy)], validation)
