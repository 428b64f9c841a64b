"""Held-out text as token contexts, with names that a report may print."""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hashtrain.data.corpus import Document, contexts, held_out_sources, read_texts
from hashtrain.data.shares import room_for
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
    sources: Callable[[], list[Document]] = held_out_sources,
) -> list[TokenDocument]:
    """Cut texts into contexts, the first of every document before any second one; a larger count only adds more.

    Args:
        text: files or folders; without any, the documents of `sources`: modules that nothing here is trained on.
        context: tokens per context.
        count: largest number of contexts.
        seed: draws the order of the documents.
    Raises: ValueError if a text is missing or not UTF-8, or if all are too short.
    """
    documents = read_texts(list(text), room=room_for(context * count)) if text else sources()
    random.Random(seed).shuffle(documents)
    first: list[TokenDocument] = []
    later: list[TokenDocument] = []
    for document in documents:
        pieces = _pieces(document, tokenizer, context, count)
        first += pieces[:1]
        later += pieces[1:]
        if len(first) == count:
            break
    if not first:
        contexts(documents, tokenizer, context, count)  # raises an error with the longest length
    return (first + later)[:count]


def _pieces(document: Document, tokenizer: PreTrainedTokenizerBase, context: int, count: int) -> list[TokenDocument]:
    try:
        found = contexts([document], tokenizer, context, count, seed=None)
    except ValueError:  # shorter than one context
        return []
    return [TokenDocument(f"{document.name}#{i + 1}" if i else document.name, ids) for i, ids in enumerate(found)]
