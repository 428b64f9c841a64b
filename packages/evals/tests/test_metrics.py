"""Every number and likeness against one worked out by hand, and exercises that hold their answers."""

import math
import re

import numpy as np
import pytest
import torch
from evals.metrics import mean_estimates, mean_kl, token_losses
from evals.synthetic import NEEDLE, QUESTION, assignment, prose
from evals.text import common_prefix, edit_similarity, holds, rouge_l, words
from hashtrain.demo import demo_model_path
from transformers import AutoTokenizer

EXACT = 1e-6  # float32 logarithms


def log(*rows):
    return torch.tensor(rows).log()


def test_token_losses_are_minus_log_of_the_target():
    found = token_losses(log([0.5, 0.25, 0.25], [0.125, 0.125, 0.75]), torch.tensor([1, 0]))
    assert found.tolist() == pytest.approx([math.log(4), math.log(8)], abs=EXACT)


def test_kl_of_two_coins():
    # 1/2 ln(1/2 / 1/4) + 1/2 ln(1/2 / 3/4) = 1/2 ln 2 + 1/2 ln 2/3.
    half, quarter = log([0.5, 0.5]), log([0.25, 0.75])
    assert mean_kl(half, quarter) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=EXACT)
    # In the other direction it differs: 1/4 ln 1/2 + 3/4 ln 3/2.
    assert mean_kl(quarter, half) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=EXACT)
    assert mean_kl(log([1.0, 0.0]), half) == pytest.approx(math.log(2), abs=EXACT)  # an impossible token is no NaN


def test_intervals_cover_the_mean_of_a_few_documents():
    found = mean_estimates(np.random.default_rng(4).normal(3.0, 1.0, size=(4, 4000)))
    assert np.mean([one.low < 3 < one.high for one in found]) == pytest.approx(0.95, abs=0.01)
    assert tuple(mean_estimates([[0.0], [1.0]], 0, 1)[0]) == (0.5, 0, 1)
    assert mean_estimates([[-2e-8], [-1e-8]], 0)[0].low == pytest.approx(-1.5e-8)


def test_the_interval_of_a_constant_is_that_constant_and_one_document_has_none():
    for found, value in zip(mean_estimates(np.full((5, 2), [[1 / 9, -0.3]])), (1 / 9, -0.3), strict=True):
        assert tuple(found) == (value,) * 3
    assert tuple(mean_estimates([[2.0]])[0]) == (2.0, None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("abc中文1", ["abc", "中", "文", "1"]), ("The naïve_café, 12", ["the", "naïve_café", ",", "12"]), ("  ", [])],
)
def test_words_of_any_script(text, expected):
    assert words(text) == expected


def test_likenesses_worked_out_by_hand():
    # Of 4 and 3 words, "the sat here" is common: 2 * 3 / (4 + 3).
    assert rouge_l("the cat sat here", "the sat here") == pytest.approx(6 / 7)
    pairs = ("你好世界", "你好世界"), ("你好世界", "再见"), ("", ""), ("a", "")
    assert [rouge_l(*pair) for pair in pairs] == [1, 0, 1, 0]
    assert edit_similarity("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert (edit_similarity("", ""), edit_similarity("abc", "")) == (1, 0)
    pairs = ([1, 2, 3, 4], [1, 2, 9, 4]), ([1, 2], [1, 2, 3]), ([1, 2], [1]), ([], [1])
    assert [common_prefix(*pair) for pair in pairs] == [0.5, 1, 0.5, 1]
    assert [holds(*pair) for pair in (("1234", "== 1234)"), ("1234", "12345"), ("a b", "a x b"))] == [1, 0, 0]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


def text_of(tokenizer, x):
    return tokenizer.decode(x.prompt)


@pytest.mark.parametrize("length", [400, 1000])
def test_the_length_is_reached_and_the_text_gives_the_answer(tokenizer, length):
    x = assignment(tokenizer, length, 0.3, length)
    assert length - 40 <= len(x.prompt) + len(x.answer) <= length
    assert tokenizer.decode(x.answer) == x.text
    text = text_of(tokenizer, x)
    ((name, value),) = re.findall(r"^(\w+_key) = (\w+)$", text, re.MULTILINE)
    assert (text.splitlines()[-1], x.text) == (f"{name} =", f" {value}")


def test_depth_is_where_the_answer_lies_and_too_short_a_length_is_refused(tokenizer):
    for depth in (0.0, 0.5, 1.0):
        lines = text_of(tokenizer, assignment(tokenizer, 1000, depth, 0)).splitlines()
        at = next(i for i, line in enumerate(lines) if "_key = " in line)
        assert at == pytest.approx(depth * (len(lines) - 2), abs=1)
    with pytest.raises(ValueError, match="choose a longer"):
        assignment(tokenizer, 8, 0.0, 0)


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
    texts = [text_of(tokenizer, prose(tokenizer, PROSE, 900, 1.0, seed)) for seed in range(9)]
    assert len({int(re.search(r"\d+", text)[0]) for text in texts}) > 3  # where it begins depends on the seed
    other = prose(tokenizer, PROSE, 900, depth, 3, "The key is green.", "What is the key like?")
    assert "The key is green." in text_of(tokenizer, other)
    assert text_of(tokenizer, other).endswith("Question: What is the key like?\nAnswer:")
