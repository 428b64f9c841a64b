"""Synthetic exercises: deterministic, of the requested length, and with the answer in the text."""

import re

import pytest
from evals.synthetic import KINDS, NEEDLE, QUESTION, exercise, prose
from hashtrain.demo import demo_model_path
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


def text_of(tokenizer, x):
    return tokenizer.decode(x.prompt)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [400, 1000])
def test_length_is_reached_and_never_exceeded(tokenizer, kind, length):
    x = exercise(kind, tokenizer, length, None, 3)
    assert length - 40 <= len(x.prompt) + len(x.answer) <= length
    assert tokenizer.decode(x.answer) == x.text


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_gives_the_answer(tokenizer, kind, seed):
    """A reader that follows the rules finds the answer in the prompt."""
    x = exercise(kind, tokenizer, 500, None, seed)
    text = text_of(tokenizer, x)
    last = text.splitlines()[-1]
    if kind in ("single", "multi", "variables"):
        values = dict(re.findall(r"^(\w+_key) = (\w+)$", text, re.MULTILINE))
        found = re.fullmatch(r"(?:assert )?(\w+_key) ==?", last).group(1)
        while found in values:
            found = values[found]
        found = f" {found}"
        assert len(values) == {"single": 1, "multi": 4, "variables": 4}[kind]
    elif kind == "copy":
        whole = re.search(r"^original = \[(.*\])$", text, re.MULTILINE).group(1)
        begun = last.removeprefix("repeated = [")
        assert whole.startswith(begun)
        found = whole.removeprefix(begun)
    else:
        names = re.findall(r"^record\((\w+)\)$", text, re.MULTILINE)
        counts = sorted((names.count(name) for name in set(names)), reverse=True)
        assert counts == [9, 3, 3, 3]
        found = max(set(names), key=names.count)
    assert found == x.text


def test_depth_is_where_the_answer_lies(tokenizer):
    for depth in (0.0, 0.5, 1.0):
        lines = text_of(tokenizer, exercise("single", tokenizer, 1000, depth, 0)).splitlines()
        at = next(i for i, line in enumerate(lines) if "_key = " in line)
        assert at == pytest.approx(depth * (len(lines) - 2), abs=1)


def test_too_short_a_length_is_refused(tokenizer):
    with pytest.raises(ValueError, match="choose a longer"):
        exercise("copy", tokenizer, 30, None, 0)


PROSE = " ".join(f"Sentence number {n} says nothing of any use." for n in range(400))


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_prose_hides_a_sentence_between_others_and_asks_about_it(tokenizer, depth):
    x = prose(tokenizer, PROSE, 900, depth, 3)
    assert 900 - 40 <= len(x.prompt) + len(x.answer) <= 900
    text = text_of(tokenizer, x)
    assert text.startswith("This is a very long story book: <book> ")
    assert text.endswith(f"Question: {QUESTION}\nAnswer:")
    assert tokenizer.decode(x.answer) == f" {NEEDLE}"
    inside = text[text.index("<book> ") + 7 : text.index(" </book>")]
    sentences = re.split(r"(?<=\.)\s+", inside)
    assert sentences.index(NEEDLE) == pytest.approx(depth * (len(sentences) - 1), abs=1)
    numbers = [int(re.search(r"\d+", one)[0]) for one in sentences if one != NEEDLE]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert x.prompt.tolist() == prose(tokenizer, PROSE, 900, depth, 3).prompt.tolist()
    assert (
        len({int(re.search(r"\d+", text_of(tokenizer, prose(tokenizer, PROSE, 900, 1.0, s)))[0]) for s in range(9)}) > 3
    )
    other = prose(tokenizer, PROSE, 900, depth, 3, "The key is green.", "What is the key like?")
    assert "The key is green." in text_of(tokenizer, other)
    assert text_of(tokenizer, other).endswith("Question: What is the key like?\nAnswer:")
