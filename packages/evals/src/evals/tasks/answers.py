"""Exercises with a known answer: score each method's reading of it after a dense prefill."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from sparse_decode import Budget
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evals.attending import attending
from evals.documents import TokenDocument
from evals.methods import DENSE, LoadedMethod
from evals.metrics import bootstrap
from evals.results import Result, Row
from evals.settings import Always
from evals.setup import Ready, Sample, each_document, finish, load_with_documents, rows_of
from evals.synthetic import Exercise
from evals.tasks.exercises_settings import SyntheticCommand


class Cell(NamedTuple):
    """A method at a budget."""

    method: str
    budget: float | None


def cells_of(command: SyntheticCommand, ready: Ready) -> list[Cell]:
    """Return dense attention, then every method at every budget."""
    sparse = [Cell(m.name, budget) for budget in command.budgets for m in ready.methods if m.selector]
    return [Cell(DENSE, None), *sparse]


def methods_of(ready: Ready) -> dict[str, LoadedMethod]:
    """Return every method by name, always including dense attention."""
    dense = LoadedMethod(DENSE, DENSE, None, DENSE, None, None)
    return {DENSE: dense, **{method.name: method for method in ready.methods}}


def as_document(name: str, exercises: Sequence[Exercise]) -> TokenDocument:
    """Combine exercises into a named document, so that a stored sample of other exercises is noticed."""
    return TokenDocument(name, torch.cat([part for x in exercises for part in (x.prompt, x.answer)]))


How = tuple[LoadedMethod, float | None, Always]
"""A method, its budget, and the settings of all methods."""


class Answer(NamedTuple):
    """Scores of an answer."""

    log_prob: float
    """Mean log-probability of its tokens, nats."""
    tokens: float
    """Share of its tokens that were the most likely."""
    exact: float
    """1 if all were, so that greedy decoding produces the answer; else 0."""
    density: float
    """Tokens attended to / visible."""


@torch.inference_mode()
def read_answer(
    model: PreTrainedModel, exercise: Exercise, method: LoadedMethod, budget: float | None, always: Always
) -> Answer:
    """Score an answer in one pass: rows before the prompt's last one are dense, all later rows use the method."""
    ids, count = torch.cat([exercise.prompt, exercise.answer]), len(exercise.answer)
    with attending(model, method, Budget(budget or 1.0), always, len(exercise.prompt) - 1) as attended:
        logits = model(ids[None, :-1].to(model.device), use_cache=False, logits_to_keep=count).logits[0]
    log_probs = logits.float().log_softmax(-1).cpu()
    right = log_probs.argmax(-1) == exercise.answer
    mean = log_probs.gather(-1, exercise.answer[:, None]).mean().item()
    return Answer(mean, right.double().mean().item(), float(right.all()), attended.density)


@torch.inference_mode()
def continue_greedily(
    model: PreTrainedModel, ids: Tensor, count: int, method: LoadedMethod, budget: float | None, always: Always
) -> tuple[Tensor, float]:
    """Generate `count` tokens after ids [T]. The prompt is dense except its last row, so that every token, even the
    first, comes from the method. Returns: the tokens [count] and the density of these rows.
    """
    with attending(model, method, Budget(budget or 1.0), always, len(ids) - 1) as attended:
        prompt = ids[None].to(model.device)
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "num_beams": 1}
        options |= {"pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
        found = model.generate(prompt, **options)  # pyright: ignore[reportCallIssue]
    return found[0, len(ids) :].cpu(), attended.density


def to_text(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> str:
    """Decode tokens to text, without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def run_exercises(
    command: SyntheticCommand,
    names: tuple[str, str],
    console: Console,
    make: Callable[[PreTrainedTokenizerBase], Callable[[int], list[Exercise]]],
    score: Callable[[Ready, Exercise, How], dict[str, Any]],
    places: Sequence[str],
    metrics: Sequence[str],
    where: Callable[[dict[str, Any]], str],
) -> Result:
    """Score every method's answers to exercises, and store the results.

    Args:
        names: of the task, and of its documents.
        make: returns a function that creates the exercises of a document, given a seed.
        score: returns an answer's `metrics`, and its density.
        places: attributes of an exercise that its answers are stored with; `where` names them in a table.
    """
    made: list[list[Exercise]] = []

    def documents(tokenizer: PreTrainedTokenizerBase) -> list[TokenDocument]:
        of_seed = make(tokenizer)
        made.extend(of_seed(command.seed * 1_000_003 + trial) for trial in range(command.documents))
        return [as_document(f"{names[1]} {i + 1}", found) for i, found in enumerate(made)]

    ready = load_with_documents(command, names[0], console, documents)
    cells, methods = cells_of(command, ready), methods_of(ready)

    def compute(number: int, document: TokenDocument, step: Callable[[str], None]) -> Sample:
        found: list[dict[str, Any]] = []
        for cell in cells:
            how = methods[cell.method], cell.budget, command.always
            for x in made[number]:
                at = {name: getattr(x, name) for name in places}
                found.append({**cell._asdict(), **at, **score(ready, x, how)})
            step(cell.method)
        return {"answers": found}

    samples = each_document(command, ready, console, len(cells), compute)
    return finish(command, ready, list(answer_rows(command, ready, samples, metrics, where)), console)


def answer_rows(
    command: SyntheticCommand,
    ready: Ready,
    samples: list[Sample],
    metrics: Sequence[str],
    where: Callable[[dict[str, Any]], str],
) -> Iterator[Row]:
    """Yield each metric's mean over the samples, for every method, budget and place; `where` names a place."""
    row = rows_of(command, ready, "decode", len(samples))
    for i, first in enumerate(samples[0]["answers"]):
        found = [sample["answers"][i] for sample in samples]
        at = {"where": where(first), "budget": first["budget"], "rule": "visible"}
        at["density"] = sum(answer["density"] for answer in found) / len(found)
        estimates = bootstrap([[answer[name] for name in metrics] for answer in found], command.seed)
        for name, estimate in zip(metrics, estimates, strict=True):
            yield row(first["method"], name, estimate, **at)
