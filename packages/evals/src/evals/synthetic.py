"""Synthetic long-context exercises like RULER's (Hsieh et al. 2024): any length, any tokenizer, no download.

They are written as Python source, which suits the demo model best. Filler lines carry no answer; the lines with the
answer lie at a chosen depth among them; the prompt ends where the answer begins. `prose` hides a sentence in a text of
the reader's, as in the usual needle test (Kamradt 2023).
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
        kind: one of `KINDS`, or `prose`.
        length: most tokens of prompt and answer; depth: where in it the answer lies, 0 to 1.
        prompt, answer: int64 [tokens].
        text: the answer, as text.
    """

    kind: str
    length: int
    depth: float
    prompt: "Tensor"
    answer: "Tensor"
    text: str


# Questions end before a space, because tokenizers join a space to the word after it.
def single_key(draw: random.Random) -> tuple[list[str], str, str]:
    """One value is set; the question asks for it."""
    name, value = draw.choice(NAMES), draw.randrange(1000, 10000)
    return [f"{name}_key = {value}"], f"{name}_key =", f" {value}"


def multi_key(draw: random.Random) -> tuple[list[str], str, str]:
    """Four values are set; the question asks for one of them."""
    names = draw.sample(NAMES, 4)
    values = [draw.randrange(1000, 10000) for _ in names]
    asked = draw.randrange(4)
    lines = [f"{name}_key = {value}" for name, value in zip(names, values, strict=True)]
    return lines, f"{names[asked]}_key =", f" {values[asked]}"


def variable_tracking(draw: random.Random) -> tuple[list[str], str, str]:
    """A value is passed from name to name; the question asks for the last one."""
    names, value = draw.sample(NAMES, 4), draw.choice(NAMES)
    lines = [f"{names[0]}_key = {value}"]
    lines += [f"{b}_key = {a}_key" for a, b in itertools.pairwise(names)]
    return lines, f"assert {names[-1]}_key ==", f" {value}"


def copy(draw: random.Random) -> tuple[list[str], str, str]:
    """A list of words is given; its beginning is repeated and must be continued."""
    found = [draw.choice(NAMES) for _ in range(12)]
    return [f"original = [{', '.join(found)}]"], f"repeated = [{', '.join(found[:4])}", f", {', '.join(found[4:])}]"


def aggregation(draw: random.Random) -> tuple[list[str], str, str]:
    """Words are recorded repeatedly, one more often than all others; the question asks for the most frequent one."""
    chosen = draw.sample(NAMES, 4)
    records = [chosen[0]] * 9 + [name for name in chosen[1:] for _ in range(3)]
    draw.shuffle(records)
    return [f"record({name})" for name in records], "record(", chosen[0]


KINDS: dict[str, Callable[[random.Random], tuple[list[str], str, str]]] = {
    "single": single_key,
    "multi": multi_key,
    "variables": variable_tracking,
    "copy": copy,
    "aggregation": aggregation,
}
_SPREAD = ("multi", "variables", "aggregation")
"""Kinds whose lines are spread over the text from the given depth on; the lines of the others lie at that depth."""


def exercise(kind: str, tokenizer: "PreTrainedTokenizerBase", length: int, depth: float | None, seed: int) -> Exercise:
    """Create an exercise; the same arguments give the same one on any machine.

    Args:
        kind: one of `KINDS`.
        length: most tokens of prompt and answer together, approached as closely as whole lines allow.
        depth: 0 is the beginning, 1 the end; None draws it.
    Raises: ValueError if the length leaves no room for the question.
    """
    import torch  # imported here: `--help` needs only the kinds

    draw = random.Random(f"{kind} {seed}")
    lines, question, text = KINDS[kind](draw)
    depth = draw.random() if depth is None else depth
    answer = _ids(tokenizer, text)
    room = length - len(answer)
    filler = [_filler(draw) for _ in range(room)]  # every line has at least one token

    def prompt(count: int) -> str:
        return "\n".join([*_placed(filler[:count], lines, depth, kind in _SPREAD), question])

    refusal = f"a length of {length} tokens leaves no room for an exercise of kind {kind}"
    ids = _ids(tokenizer, prompt(_most(prompt, tokenizer, room, refusal)), True)
    return Exercise(kind, length, depth, torch.tensor(ids), torch.tensor(answer), text)


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
        length, depth: as for `exercise`.
    Returns: an exercise whose answer is the needle.
    Raises: ValueError if the length leaves no room for the question, or the text is shorter than the length.
    """
    import torch

    answer = _ids(tokenizer, f" {needle}")
    room = length - len(answer)
    sentences = _SENTENCE.split(haystack.strip())
    left = list(itertools.accumulate(map(len, reversed(sentences))))[::-1]  # characters from each sentence on
    enough = sum(size >= _CHARACTERS * room for size in left)
    start = random.Random(f"prose {seed}").randrange(max(1, enough))
    found = sentences[start : start + room]  # a sentence has at least one token

    def prompt(count: int) -> str:
        text = " ".join(_placed(found[:count], [needle], depth, spread=False))
        return _PROMPT.format(text=text, question=question)

    count = _most(
        prompt, tokenizer, room, f"a length of {length} tokens leaves no room for the needle and its question"
    )
    if count >= len(found):
        raise ValueError(
            f"the haystack is too short for {length} tokens: expected a longer text, got {len(haystack)} characters"
        )
    ids = _ids(tokenizer, prompt(count), True)
    return Exercise("prose", length, depth, torch.tensor(ids), torch.tensor(answer), needle)


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


def _placed(filler: list[str], lines: list[str], depth: float, spread: bool) -> list[str]:
    """Insert lines into filler, in order: together at the depth, or spread evenly from there to the end."""
    start = round(depth * len(filler))
    places = [start + (i * (len(filler) - start)) // len(lines) if spread else start for i in range(len(lines))]
    placed, taken = [], 0
    for place, line in zip(places, lines, strict=True):
        placed += [*filler[taken:place], line]
        taken = place
    return placed + filler[taken:]
