"""A needle in a haystack, by length and depth: the text each method generates, and the likelihood of the answer."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hashtrain.data.corpus import read_texts
from hashtrain.data.shares import room_for
from matplotlib.figure import Figure
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from evals.commands import NeedleCommand
from evals.figures import save
from evals.methods import DENSE
from evals.result import Result
from evals.setup import Ready
from evals.synthetic import Exercise, exercise, prose
from evals.tasks.answers import How, continue_greedily, read_answer, run_exercises, to_text
from evals.text import holds, rouge_l, word_recall

METRICS = ("rouge_l", "recall", "substring", "log_prob")
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
        scores = {"rouge_l": rouge_l(x.text, line), "recall": word_recall(x.text, line)}
        scores |= {"substring": holds(x.text, line), "log_prob": answer.log_prob, "density": density}
        return {"written": text, **scores}

    def where(answer: dict[str, Any]) -> str:
        return where_of(answer["length"], answer["depth"])

    result = run_exercises(command, ("needle", "needle"), console, make, score, ("length", "depth"), METRICS, where)
    draw_heat(result, command, command.out / "figure.png")
    return result


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


def draw_heat(result: Result, command: NeedleCommand, path: Path) -> None:
    """Draw a heat map over length and depth: dense, then each method and its difference to dense.

    Of prose it shows Rouge-L of the answer, as the paper does; of Python the log-probability of the correct one.
    """
    metric, best = ("rouge_l", 1.0) if command.haystack else ("log_prob", 0.0)

    def grid(method: str, budget: float | None) -> np.ndarray:
        at = {"method": method, "budget": budget, "metric": metric}
        places = [[where_of(n, depth) for n in command.lengths] for depth in command.depths]
        return np.array([[result.one(where=where, **at).value for where in line] for line in places])

    dense, budget = grid(DENSE, None), command.budgets[0]
    names = list(dict.fromkeys(row.method for row in result.rows if row.method != DENSE))
    figure = Figure(figsize=(8, 2.4 * (len(names) + 1)), layout="constrained")
    axes = figure.subplots(len(names) + 1, 2, squeeze=False)
    axes[0, 1].set_axis_off()
    found = {name: grid(name, budget) for name in names}
    least = 0.0 if command.haystack else min(values.min() for values in (dense, *found.values()))
    widest = max(1e-6, *(abs(values - dense).max() for values in found.values()))
    panels = [(axes[0, 0], dense, DENSE)]
    for i, name in enumerate(names):
        panels.append((axes[i + 1, 0], found[name], name))
        panels.append((axes[i + 1, 1], found[name] - dense, f"{name} - dense"))
    for panel, values, title in panels:
        signed = title.endswith("- dense")
        limits = {"cmap": "RdBu", "vmin": -widest, "vmax": widest} if signed else {"vmin": least, "vmax": best}
        image = panel.imshow(values, aspect="auto", **limits)
        panel.set(title=title, xticks=range(len(command.lengths)), yticks=range(len(command.depths)))
        panel.set_xticklabels([str(n) for n in command.lengths])
        panel.set_yticklabels([f"{100 * d:g} %" for d in command.depths])
        figure.colorbar(image, ax=panel)
    figure.suptitle("Rouge-L" if command.haystack else "log-probability of the answer, nats a token")
    figure.supxlabel("length, tokens")
    figure.supylabel("depth")
    save(figure, path, 100)
