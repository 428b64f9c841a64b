"""Text similarity: Rouge-L, edit similarity, common prefix. Our own code because `rouge_score` drops non-ASCII."""

import re
from collections.abc import Sequence

# In scripts without spaces each character is a word. Every other character that is neither word nor space is one too.
_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")


def words(text: str) -> list[str]:
    """Split a text in any script into casefolded words and punctuation marks."""
    return _WORD.findall(text.casefold())


def common_subsequence(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the longest common subsequence."""
    line = [0] * (len(b) + 1)
    for x in a:
        before = 0  # the previous row's value, one column to the left
        for j, y in enumerate(b):
            above = line[j + 1]
            line[j + 1] = before + 1 if x == y else max(above, line[j])
            before = above
    return line[-1]


def rouge_l(reference: str, other: str) -> float:
    """Return Rouge-L, the F1 of the longest common subsequence of words; 1 for two empty texts."""
    a, b = words(reference), words(other)
    return 2 * common_subsequence(a, b) / (len(a) + len(b)) if a or b else 1.0


def edit_similarity(reference: str, other: str) -> float:
    """Return 1 - d / n: d is the Levenshtein distance in characters, n the longer length; 1 for two empty texts."""
    longest = max(len(reference), len(other))
    line = list(range(len(other) + 1))
    for i, x in enumerate(reference):
        before, line[0] = i, i + 1
        for j, y in enumerate(other):
            above = line[j + 1]
            line[j + 1] = min(before + (x != y), above + 1, line[j] + 1)
            before = above
    return 1 - line[-1] / longest if longest else 1.0


def common_prefix(reference: Sequence[object], other: Sequence[object]) -> float:
    """Return the share of the reference before the first difference; 1 for an empty reference."""
    pairs = zip(reference, other, strict=False)
    alike = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(reference), len(other)))
    return alike / len(reference) if reference else 1.0


def holds(reference: str, other: str) -> float:
    """Return 1 if the other text contains the reference's words in sequence, else 0; 1 for an empty reference."""
    a, b = words(reference), words(other)
    return float(any(b[i : i + len(a)] == a for i in range(len(b) - len(a) + 1)))
