"""Held-out text as token contexts, with names that a report may print."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hashtrain.data.corpus import held_out_sources, numbered_contexts, read_texts
from hashtrain.data.texts import room_for
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenDocument:
    """One context: its name and its tokens, int64 [context]."""

    name: str
    ids: Tensor

    @property
    def digest(self) -> str:
        """Identifies the tokens."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()[:12]


def load_documents(
    text: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    count: int,
    seed: int,
    within: int | None = None,
) -> list[TokenDocument]:
    """Cut texts into contexts, of each path in turn; a larger count only adds more (`numbered_contexts`).

    Args:
        text: files or folders; without any, standard-library modules that nothing here is trained on.
        context: tokens per context.
        count: largest number of contexts.
        seed: draws the order of a folder's documents.
        within: cut contexts of so many tokens, and keep the last `context` of each.
    Raises: ValueError if a text is missing or not UTF-8, or if all are too short.
    """
    documents = read_texts(list(text), room=room_for((within or context) * count)) if text else held_out_sources()
    found, seen = list[TokenDocument](), Counter[int]()
    for number, ids in numbered_contexts(documents, tokenizer, context, count, seed, within):
        seen[number] += 1
        name = documents[number].name
        found.append(TokenDocument(f"{name}#{seen[number]}" if seen[number] > 1 else name, ids))
    return found
