"""Contexts are tokenised as they are used, kept on disk, and the same in whatever way they are asked for."""

import itertools
import json
import random

import pytest
import torch
from hashtrain.data import token_contexts
from hashtrain.data.corpus import contexts, tokenise_with
from hashtrain.data.texts import Document, Texts, list_texts
from hashtrain.data.token_contexts import TokenContexts, key_of, sweep
from hashtrain.demo import demo_model_path
from transformers import AutoTokenizer

LENGTH, MOST = 16, 24


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture
def documents():
    draw = random.Random(0)
    sizes = [draw.choice([3, 20, 100, 400]) for _ in range(12)]
    return [Document(f"{n}", " ".join(f"word{n}x{i}" for i in range(size)), n % 3) for n, size in enumerate(sizes)]


def reference(documents, tokenizer, seed):
    """The rule in a few lines: first pieces in document order, then the others, each corpus in turn."""
    order = list(documents)
    random.Random(seed).shuffle(order)
    turns = itertools.zip_longest(*([d for d in order if d.corpus == corpus] for corpus in range(3)))
    pieces = [
        (document.corpus, [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)])
        for document in itertools.chain(*turns)
        if document is not None
        for ids in [tokenizer(document.text, add_special_tokens=False).input_ids]
    ]
    first = [found[0] for _, found in pieces if found]
    rest = {}
    for corpus, found in pieces:
        rest.setdefault(corpus, []).extend(found[1:])
    later = [one for group in itertools.zip_longest(*rest.values()) for one in group if one is not None]
    return [*first, *later][:MOST]


class Counted:
    """A tokenise function that counts what it was given."""

    def __init__(self, tokenizer):
        self.inner, self.batches = tokenise_with(tokenizer, LENGTH * MOST), []

    def __call__(self, texts):
        self.batches.append(len(texts))
        return self.inner(texts)


def made(documents, tokenizer, **more):
    counted = Counted(tokenizer)
    return TokenContexts(documents, counted, LENGTH, MOST, 5, **more), counted


def test_contexts_are_those_of_the_rule_in_any_order_of_asking(documents, tokenizer):
    wanted = reference(documents, tokenizer, 5)
    assert [ids.tolist() for ids in contexts(documents, tokenizer, LENGTH, MOST, 5)] == wanted
    backwards, _ = made(documents, tokenizer)
    assert len(backwards) == len(wanted)
    assert [backwards[n].tolist() for n in reversed(range(len(wanted)))] == wanted[::-1]
    assert all(ids.dtype == torch.int64 for ids in backwards)
    with pytest.raises(IndexError):
        backwards[len(wanted)]


def test_the_first_context_needs_one_document_and_many_come_in_batches(tokenizer):
    many = [Document(str(n), "some words " * 9000) for n in range(60)]
    found, counted = made(many, tokenizer)
    found[0]
    assert counted.batches == [1]
    found[23]
    assert max(counted.batches) > 1
    assert sum(counted.batches) < 60  # no more than the contexts need


def test_a_second_start_reads_what_the_first_has_kept(documents, tokenizer, tmp_path):
    wanted, file = reference(documents, tokenizer, 5), tmp_path / "ids" / "train.ids"
    first, _ = made(documents, tokenizer, kept=file, key="a")
    first[2]
    first.keep(file)
    size = file.stat().st_size
    first[len(wanted) - 1]  # what follows is added to the file
    assert file.stat().st_size > size
    second, counted = made(documents, tokenizer, kept=file, key="a")
    assert second.stored
    assert [ids.tolist() for ids in second] == wanted
    assert not counted.batches
    other, counted = made(documents, tokenizer, kept=file, key="b")
    assert not other.stored
    assert [ids.tolist() for ids in other] == wanted
    assert counted.batches


def test_an_interrupted_start_goes_on_after_the_last_whole_batch(documents, tokenizer, tmp_path):
    wanted, file = reference(documents, tokenizer, 5), tmp_path / "train.ids"
    first, _ = made(documents, tokenizer, kept=file, key="a")
    first[1]
    first.keep(file)
    index = file.with_suffix(".json").read_text()
    first[len(wanted) - 1]
    file.with_suffix(".json").write_text(index)  # killed after tokens were written, before the index was
    second, _ = made(documents, tokenizer, kept=file, key="a")
    assert [ids.tolist() for ids in second] == wanted


def test_damaged_files_are_noticed(documents, tokenizer, tmp_path):
    file = tmp_path / "train.ids"
    first, _ = made(documents, tokenizer, kept=file, key="a")
    len(first)
    first.keep(file)
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    second, _ = made(documents, tokenizer, kept=file, key="a")
    with pytest.raises(ValueError, match="is damaged"):
        list(second)
    for broken in (content[:-1], b""):  # shorter than its index says: made anew
        file.write_bytes(broken)
        assert not made(documents, tokenizer, kept=file, key="a")[0].stored
    file.with_suffix(".json").write_text("{")
    assert not made(documents, tokenizer, kept=file, key="a")[0].stored


def test_the_key_follows_the_files_the_tokenizer_and_the_settings(tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    texts = list_texts([tmp_path])
    keys = {key_of(texts, tokenizer, {"seed": 0})}
    assert key_of(list_texts([tmp_path]), tokenizer, {"seed": 0}) in keys
    keys.add(key_of(texts, tokenizer, {"seed": 1}))
    (tmp_path / "text.txt").write_text("other texts")
    keys.add(key_of(texts, tokenizer, {"seed": 0}))
    changed = AutoTokenizer.from_pretrained(demo_model_path())
    changed.add_tokens(["<new>"])
    keys.add(key_of(texts, changed, {"seed": 0}))
    keys.add(key_of([Document("text.txt", "other texts")], tokenizer, {"seed": 0}))
    keys.add(key_of([Document("text.txt", "Other texts")], tokenizer, {"seed": 0}))
    assert len(keys) == 6


def test_listed_texts_are_read_only_when_used(tmp_path, monkeypatch):
    for number in range(7):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    texts = list_texts([tmp_path])
    monkeypatch.setattr("hashtrain.data.texts._read_span", lambda span: pytest.fail("a file was read"))
    assert isinstance(texts[::5], Texts)
    assert token_contexts.corpora(texts) == [0] * 7
    assert len(texts[1:]) == 6
    monkeypatch.undo()
    assert [document.text for document in texts[::5]] == ["text 0", "text 5"]


def test_files_of_other_contexts_are_swept(tmp_path):
    mine = [tmp_path / "train.ids", tmp_path / "held.ids"]
    for path in (*mine, tmp_path / "train.json", tmp_path / "old.ids", tmp_path / "old.json"):
        path.write_text(json.dumps({}))
    sweep(tmp_path, mine)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held.ids", "train.ids", "train.json"]
    sweep(tmp_path / "none", mine)
