"""What the tasks that generate text share: a method at a budget, and greedy continuations with it."""

from typing import NamedTuple

import torch
from sparse_decode import Budget
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evals.attending import attending
from evals.methods import DENSE, LoadedMethod
from evals.settings import Always
from evals.setup import Ready


class Cell(NamedTuple):
    """A method at a budget."""

    method: str
    budget: float | None


def methods_of(ready: Ready) -> dict[str, LoadedMethod]:
    """Return every method by name, always including dense attention."""
    dense = LoadedMethod(DENSE, DENSE, None, DENSE, None, None)
    return {DENSE: dense, **{method.name: method for method in ready.methods}}


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
        options |= {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}  # the model's own settings may have others
        found = model.generate(prompt, **options)  # pyright: ignore[reportCallIssue]
    return found[0, len(ids) :].cpu(), attended.density


def to_text(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> str:
    """Decode tokens to text, without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True))
