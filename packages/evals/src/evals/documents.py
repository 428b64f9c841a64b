"""Held-out text as token contexts with names a report may print."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hashtrain.corpus import Document, contexts, held_out_sources, read_texts
from hashtrain.shares import room_for
from torch import Tensor
from transformers import PreTrainedTokenizerBase


class Measured(Protocol):
    """What one stored sample is of."""

    @property
    def name(self) -> str:
        """As a report may print it."""
        ...

    @property
    def digest(self) -> str:
        """Identify what it holds."""
        ...


@dataclass(frozen=True)
class TokenDocument:
    """One context: its name and its tokens, int64 [context]."""

    name: str
    ids: Tensor

    @property
    def digest(self) -> str:
        """Identify the tokens."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()[:12]


def load_documents(
    text: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    count: int,
    seed: int,
    sources: Callable[[], list[Document]] = held_out_sources,
) -> list[TokenDocument]:
    """Cut texts into contexts, the first of every document before second ones; asking for more keeps the first.

    Args:
        text: files or folders; without any, what `sources` gives: the modules that nothing here is trained on.
        context: tokens each.
        count: at most this many.
        seed: the order in which documents are drawn.
    Raises: ValueError if a text is missing, not UTF-8, or every one is too short.
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
        contexts(documents, tokenizer, context, count)  # says how long the longest is
    return (first + later)[:count]


def _pieces(document: Document, tokenizer: PreTrainedTokenizerBase, context: int, count: int) -> list[TokenDocument]:
    try:
        found = contexts([document], tokenizer, context, count, seed=None)
    except ValueError:  # shorter than one context
        return []
    return [TokenDocument(f"{document.name}#{i + 1}" if i else document.name, ids) for i, ids in enumerate(found)]
