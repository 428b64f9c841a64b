"""Every similarity of texts against one worked out by hand."""

import pytest
from evals.text import common_prefix, edit_similarity, holds, rouge_l, word_recall, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat, sat.", ["the", "cat", ",", "sat", "."]),
        ("中文字", ["中", "文", "字"]),
        ("abc中文1", ["abc", "中", "文", "1"]),
        ("naïve café", ["naïve", "café"]),
        ("snake_case = 12", ["snake_case", "=", "12"]),
        ("  ", []),
    ],
)
def test_words_of_any_script(text, expected):
    assert words(text) == expected


def test_rouge_l_worked_out_by_hand():
    # Of 4 and 3 words, "the sat here" is common: 2 * 3 / (4 + 3).
    assert rouge_l("the cat sat here", "the sat here") == pytest.approx(6 / 7)
    assert rouge_l("你好世界", "你好世界") == 1
    assert rouge_l("你好世界", "再见") == 0
    assert rouge_l("", "") == 1
    assert rouge_l("a", "") == 0


def test_edit_similarity_worked_out_by_hand():
    assert edit_similarity("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert edit_similarity("", "") == 1
    assert edit_similarity("abc", "") == 0


def test_common_prefix_worked_out_by_hand():
    assert common_prefix([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert common_prefix([1, 2], [1, 2, 3]) == 1
    assert common_prefix([1, 2], [1]) == 0.5
    assert common_prefix([], [1]) == 1


def test_recall_and_substring_worked_out_by_hand():
    assert word_recall("eat a sandwich", "a sandwich, they say") == pytest.approx(2 / 3)
    assert holds("1234", "== 1234)") == 1
    assert holds("1234", "12345") == 0
    assert holds("a b", "a x b") == 0
