"""Needles in haystacks of any length: any tokenizer, no download.

`assignment` writes Python source, which suits the demo model best: filler lines carry no answer, one line at a chosen
depth does, and the prompt ends where the answer begins. `prose` hides a sentence in a text of the reader's, as in the
usual needle test (Kamradt 2023).
"""

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

NAMES = (
    *("apple", "river", "stone", "cloud", "tiger", "lemon", "piano", "eagle", "maple", "ocean", "candle", "mirror"),
    *("garden", "silver", "window", "basket"),
)
_PARTS = ["size", "count", "index", "total", "width", "height", "limit", "offset", "level", "state"]


NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
QUESTION = "What is the best thing to do in San Francisco?"
"""Needle and question of the usual test (Kamradt 2023)."""
_PROMPT = (
    "This is a very long story book: <book> {text} </book>.\nBased on the content of the book, Question: {question}\n"
    "Answer:"
)
"""The usual prompt for models that were not tuned to follow instructions."""
_CHARACTERS = 8  # a token, at most, over a long text
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Exercise:
    """One question and its answer.

    Attributes:
        length: most tokens of prompt and answer; depth: where in it the answer lies, 0 to 1.
        prompt, answer: int64 [tokens].
        text: the answer, as text.
    """

    length: int
    depth: float
    prompt: "Tensor"
    answer: "Tensor"
    text: str


def assignment(tokenizer: "PreTrainedTokenizerBase", length: int, depth: float, seed: int) -> Exercise:
    """Set a value among lines of Python, and ask for it; the same arguments give the same exercise on any machine.

    Args:
        length: most tokens of prompt and answer together, approached as closely as whole lines allow.
        depth: 0 is the beginning, 1 the end.
    Raises: ValueError if the length leaves no room for the question.
    """
    import torch  # imported here: `--help` needs only the default needle

    draw = random.Random(f"single {seed}")
    name, value = draw.choice(NAMES), draw.randrange(1000, 10000)
    text = f" {value}"
    answer = torch.tensor(_ids(tokenizer, text), dtype=torch.int64)
    room = length - len(answer)
    filler = [_filler(draw) for _ in range(room)]  # every line has at least one token

    def prompt(count: int) -> str:
        # The question ends before a space, because tokenizers join a space to the word after it.
        return "\n".join([*_hidden(filler[:count], f"{name}_key = {value}", depth), f"{name}_key ="])

    refusal = f"a length of {length} tokens leaves no room for a value and its question"
    ids = _ids(tokenizer, prompt(_most(prompt, tokenizer, room, refusal)), True)
    return Exercise(length, depth, torch.tensor(ids, dtype=torch.int64), answer, text)


def prose(
    tokenizer: "PreTrainedTokenizerBase",
    haystack: str,
    length: int,
    depth: float,
    seed: int,
    needle: str = NEEDLE,
    question: str = QUESTION,
) -> Exercise:
    """Hide a sentence between two sentences of a text, and ask about it in the usual prompt.

    Args:
        haystack: the text starts at a sentence drawn from it; seed: draws it.
        length, depth: as for `assignment`.
    Returns: an exercise whose answer is the needle.
    Raises: ValueError if the length leaves no room for the question, or the text is shorter than the length.
    """
    import torch

    answer = torch.tensor(_ids(tokenizer, f" {needle}"), dtype=torch.int64)
    room = length - len(answer)
    sentences = _SENTENCE.split(haystack.strip())
    left = list(itertools.accumulate(map(len, reversed(sentences))))[::-1]  # characters from each sentence on
    enough = sum(size >= _CHARACTERS * room for size in left)
    start = random.Random(f"prose {seed}").randrange(max(1, enough))
    found = sentences[start : start + room]  # a sentence has at least one token

    def prompt(count: int) -> str:
        text = " ".join(_hidden(found[:count], needle, depth))
        return _PROMPT.format(text=text, question=question)

    count = _most(
        prompt, tokenizer, room, f"a length of {length} tokens leaves no room for the needle and its question"
    )
    if count >= len(found):
        raise ValueError(
            f"the haystack is too short for {length} tokens: expected a longer text, got {len(haystack)} characters"
        )
    ids = _ids(tokenizer, prompt(count), True)
    return Exercise(length, depth, torch.tensor(ids, dtype=torch.int64), answer, needle)


def _most(prompt: Callable[[int], str], tokenizer: "PreTrainedTokenizerBase", room: int, refusal: str) -> int:
    """Return the largest n for which `prompt(n)` has at most `room` tokens.

    Raises: ValueError, which starts with `refusal`, if even `prompt(0)` is longer.
    """
    if (least := len(_ids(tokenizer, prompt(0), True))) > room:
        raise ValueError(f"{refusal}, which takes {least - room} tokens more; choose a longer one")
    fits, beyond = 0, room + 1
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if len(_ids(tokenizer, prompt(middle), True)) <= room:
            fits = middle
        else:
            beyond = middle
    return fits


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str, special: bool = False) -> list[int]:
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]  # pyright: ignore


def _filler(draw: random.Random) -> str:
    """Return a line that assigns something unrelated, with a two-digit number."""
    return f"self.{draw.choice(_PARTS)}_{draw.choice(_PARTS)} = {draw.choice(_PARTS)}({draw.randrange(10, 100)})"


def _hidden(filler: list[str], line: str, depth: float) -> list[str]:
    """Insert a line into filler at a depth."""
    at = round(depth * len(filler))
    return [*filler[:at], line, *filler[at:]]
