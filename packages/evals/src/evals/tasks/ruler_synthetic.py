"""Synthetic exercises (`evals.synthetic`), by kind and length."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from evals.results import Result
from evals.setup import Ready
from evals.synthetic import Exercise, exercise
from evals.tasks.answers import How, read_answer, run_exercises
from evals.tasks.exercises_settings import SyntheticRulerCommand

METRICS = ("exact", "tokens", "log_prob")


def run(command: SyntheticRulerCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""

    def make(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], list[Exercise]]:
        cases = [(kind, n) for kind in command.kinds for n in command.lengths]
        return lambda seed: [exercise(kind, tokenizer, n, None, seed) for kind, n in cases]

    def score(ready: Ready, x: Exercise, how: How) -> dict[str, Any]:
        return read_answer(ready.model, x, *how)._asdict()

    def where(answer: dict[str, Any]) -> str:
        return f"{answer['kind']}, {answer['length']} tokens"

    return run_exercises(
        command, ("ruler-synthetic", "trial"), console, make, score, ("kind", "length"), METRICS, where
    )
