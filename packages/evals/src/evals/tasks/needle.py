"""A needle in a haystack, by length and depth: the text each method generates, and the likelihood of the answer."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from hashtrain.data.corpus import read_texts
from hashtrain.data.texts import room_for
from rich.console import Console
from sparse_decode import Budget
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evals.attending import attending
from evals.documents import TokenDocument
from evals.methods import DENSE, LoadedMethod
from evals.metrics import mean_estimates
from evals.results import Result, Row
from evals.settings import Always
from evals.setup import Ready, Sample, each_document, finish, load_with_documents, rows_of
from evals.synthetic import Exercise, assignment, prose
from evals.tasks.answers import Cell, continue_greedily, methods_of, to_text
from evals.tasks.settings import NeedleCommand
from evals.text import holds, rouge_l

METRICS = ("rouge_l", "substring", "log_prob")
_BEYOND = 4  # tokens generated in addition to the answer's length


def run(command: NeedleCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""
    made: list[list[Exercise]] = []

    def documents(tokenizer: PreTrainedTokenizerBase) -> list[TokenDocument]:
        hidden = _hiding(command, tokenizer)
        for seed in (command.seed * 1_000_003 + trial for trial in range(command.documents)):
            made.append([hidden(n, depth, seed) for n in command.lengths for depth in command.depths])
        # Their tokens as a document's, so that a stored sample of other exercises is noticed.
        ids = (torch.cat([part for x in found for part in (x.prompt, x.answer)]) for found in made)
        return [TokenDocument(f"needle {i + 1}", own) for i, own in enumerate(ids)]

    ready = load_with_documents(command, "needle", console, documents, max(command.lengths))
    sparse = [Cell(m.name, budget) for budget in command.budgets for m in ready.methods if m.selector]
    cells, methods = [Cell(DENSE, None), *sparse], methods_of(ready)

    def compute(number: int, document: TokenDocument, step: Callable[[str], None]) -> Sample:
        found: list[dict[str, Any]] = []
        for cell in cells:
            how = methods[cell.method], cell.budget, command.always
            for x in made[number]:
                found.append({**cell._asdict(), "length": x.length, "depth": x.depth, **_scores(ready, x, *how)})
            step(cell.method)
        return {"answers": found}

    samples = each_document(command, ready, console, len(cells), compute)
    return finish(command, ready, list(_rows(command, ready, samples)), console)


def _scores(
    ready: Ready, x: Exercise, method: LoadedMethod, budget: float | None, always: Always
) -> dict[str, str | float]:
    """Return what a method writes, its `METRICS` and its density."""
    how = method, budget, always
    written, density = continue_greedily(ready.model, x.prompt, len(x.answer) + _BEYOND, *how)
    text = to_text(ready.tokenizer, written)
    line = next(iter(text.strip().splitlines()), "")  # the answer is a single line
    scores = {"rouge_l": rouge_l(x.text, line), "substring": holds(x.text, line)}
    return {"written": text, **scores, "log_prob": log_prob(ready.model, x, *how), "density": density}


@torch.inference_mode()
def log_prob(model: PreTrainedModel, x: Exercise, method: LoadedMethod, budget: float | None, always: Always) -> float:
    """Return the mean log-probability of an answer's tokens in nats, in one pass: rows before the prompt's last one are
    dense, all later rows use the method."""
    ids, count = torch.cat([x.prompt, x.answer]), len(x.answer)
    with attending(model, method, Budget(budget or 1.0), always, len(x.prompt) - 1):
        logits = model(ids[None, :-1].to(model.device), use_cache=False, logits_to_keep=count).logits[0]
    return logits.float().log_softmax(-1).cpu().gather(-1, x.answer[:, None]).mean().item()


def _rows(command: NeedleCommand, ready: Ready, samples: list[Sample]) -> Iterator[Row]:
    """Yield each metric's mean over the samples, for every method, budget and position."""
    row = rows_of(command, ready, "decode", len(samples))
    for i, first in enumerate(samples[0]["answers"]):
        found = [sample["answers"][i] for sample in samples]
        where = f"{first['length']} tokens, depth {100 * first['depth']:g} %"
        at = {"where": where, "budget": first["budget"], "rule": "visible"}
        at["density"] = sum(answer["density"] for answer in found) / len(found)
        bounds = (0, 0, -math.inf), (1, 1, 0)
        estimates = mean_estimates([[answer[name] for name in METRICS] for answer in found], *bounds)
        for name, estimate in zip(METRICS, estimates, strict=True):
            yield row(first["method"], name, estimate, **at)


def _hiding(command: NeedleCommand, tokenizer: PreTrainedTokenizerBase) -> Callable[[int, float, int], Exercise]:
    """Return a function of length, depth and seed that hides a needle: in the user's prose, or in lines of Python."""
    if not command.haystack:
        return partial(assignment, tokenizer)
    room = room_for(max(command.lengths) * command.documents)
    texts = read_texts(list(command.haystack), room=room, seed=command.seed)
    haystack = "\n".join(document.text for document in texts)
    return partial(prose, tokenizer, haystack, needle=command.needle, question=command.question)
