"""A needle in a haystack, by length and depth: the text each method generates, and the likelihood of the answer."""

from collections.abc import Callable
from functools import partial
from typing import Any

from hashtrain.data.corpus import read_texts
from hashtrain.data.texts_to_read import room_for
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from evals.results import Result
from evals.setup import Ready
from evals.synthetic import Exercise, exercise, prose
from evals.tasks.answers import How, continue_greedily, read_answer, run_exercises, to_text
from evals.tasks.exercises_settings import NeedleCommand
from evals.text import holds, rouge_l

METRICS = ("rouge_l", "substring", "log_prob")
_BEYOND = 4  # tokens generated in addition to the answer's length


def run(command: NeedleCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""

    def make(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], list[Exercise]]:
        hidden = _hiding(command, tokenizer)
        return lambda seed: [hidden(n, depth, seed) for n in command.lengths for depth in command.depths]

    def score(ready: Ready, x: Exercise, how: How) -> dict[str, Any]:
        answer = read_answer(ready.model, x, *how)
        written, density = continue_greedily(ready.model, x.prompt, len(x.answer) + _BEYOND, *how)
        text = to_text(ready.tokenizer, written)
        line = next(iter(text.strip().splitlines()), "")  # the answer is a single line
        scores = {"rouge_l": rouge_l(x.text, line), "substring": holds(x.text, line), "log_prob": answer.log_prob}
        return {"written": text, **scores, "density": density}

    def where(answer: dict[str, Any]) -> str:
        return where_of(answer["length"], answer["depth"])

    return run_exercises(command, ("needle", "needle"), console, make, score, ("length", "depth"), METRICS, where)


def _hiding(command: NeedleCommand, tokenizer: PreTrainedTokenizerBase) -> Callable[[int, float, int], Exercise]:
    """Return a function of length, depth and seed that hides a needle: in the user's prose, or in lines of Python."""
    if not command.haystack:
        return lambda length, depth, seed: exercise("single", tokenizer, length, depth, seed)
    room = room_for(max(command.lengths) * command.documents)
    texts = read_texts(list(command.haystack), room=room, seed=command.seed)
    haystack = "\n".join(document.text for document in texts)
    return partial(prose, tokenizer, haystack, needle=command.needle, question=command.question)


def where_of(length: int, depth: float) -> str:
    """Name a position in a haystack."""
    return f"{length} tokens, depth {100 * depth:g} %"
