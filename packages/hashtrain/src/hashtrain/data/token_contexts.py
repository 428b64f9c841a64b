"""Token contexts cut from documents, one after the other as they are asked for, and kept on disk between runs.

1. Documents are tokenised several at a time, in a fixed order, and cut into pieces of one context each.
2. Context n is the first piece of the n-th document that has one. Once every document has been tokenised, further
   pieces follow, from each corpus in turn.
3. `keep` writes the pieces to a file, and from then on each new one; `TokenContexts` reads that file if its key fits.

So the first contexts exist after seconds, however much text there is, and a second run tokenises nothing again.
"""

import hashlib
import itertools
import json
import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hashtrain.data.texts import Document, Texts
from hashtrain.files.atomic import write_text
from hashtrain.files.untrusted import read_json_object

T = TypeVar("T")
Tokenise = Callable[[Sequence[str]], list[Tensor]]
"""Returns the tokens of each text, int64 [tokens]; it may stop where there are enough."""
_BATCH = 4 << 20
"""Characters tokenised at once: tokenisers take 200 bytes and more for each."""


@dataclass(eq=False)
class TokenContexts(Sequence[Tensor]):
    """Contexts of `length` tokens, int64 [length] each, at most `most`.

    Args:
        documents: read when they are needed, once; tokenise: see `Tokenise`.
        seed: shuffles the documents; None keeps their order.
        kept: a file that `keep` wrote, if any; used if its key is this one.
        key: identifies the documents, the tokeniser and the other arguments.
    """

    documents: Sequence[Document]
    tokenise: Tokenise
    length: int
    most: int
    seed: int | None = 0
    kept: Path | None = None
    key: str = ""

    def __post_init__(self) -> None:
        self.longest: int = 0
        """Tokens of the longest document so far."""
        self._corpora: list[int] = corpora(self.documents)
        self._order: list[int] = _order(self._corpora, self.seed)
        self._counts: list[int] = []  # pieces of each document, in this order
        self._starts: list[int] = []  # number of the first piece of each document that has one
        self._sums: list[int] = []  # a checksum of each piece
        self._pieces: list[Tensor] = []  # each int32 [length], while there is no file
        self._later: list[int] | None = None  # numbers of the pieces after each document's first, once all are known
        self._file: Path | None = None
        if self.kept is not None:
            self._reopen(self.kept)

    def __len__(self) -> int:
        """Count the contexts. This tokenises documents until there are enough, or none is left."""
        while len(self._sums) < self.most and self._grow():
            pass
        return min(self.most, len(self._sums))

    def __getitem__(self, index: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a context, tokenising as many documents as it takes. Raises: IndexError if there are fewer."""
        if not 0 <= index < self.most:
            raise IndexError(index)
        while index >= len(self._starts) and self._grow():
            pass
        if index < len(self._starts):
            return self._piece(self._starts[index])
        if self._later is None:
            self._later = self._in_turn()
        return self._piece(self._later[index - len(self._starts)])

    @property
    def used(self) -> list[int]:
        """Indices of the documents that have contributed a piece so far."""
        return [self._order[n] for n, count in enumerate(self._counts) if count]

    @property
    def stored(self) -> bool:
        """Whether the contexts are kept in a file."""
        return self._file is not None

    def keep(self, file: Path) -> None:
        """Write the pieces to a file, and from now on every new one."""
        if self._file is not None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:
            for pieces in self._pieces:
                opened.write(pieces.numpy().tobytes())
        self._pieces, self._file = [], file
        self._write_index()

    def _grow(self) -> bool:
        """Tokenise the next documents; return whether there were any, and they were needed."""
        if len(self._starts) >= self.most or len(self._counts) == len(self._order):
            return False
        batch, size = list[str](), 0
        most = min(_BATCH, 1 << 14 << len(self._counts).bit_length())  # small at first: the first are soon there
        for number in self._order[len(self._counts) :]:
            batch.append(self.documents[number].text)
            size += len(batch[-1])
            if size >= most:
                break
        for ids in self.tokenise(batch):
            self.longest = max(self.longest, len(ids))
            whole = ids[: len(ids) // self.length * self.length].to(torch.int32).view(-1, self.length)
            self._add(whole[: self.most])
        if self._file is not None:
            self._write_index()
        return True

    def _add(self, pieces: Tensor) -> None:
        rows = list(pieces)
        if rows:
            self._starts.append(len(self._sums))
        if self._file is None:
            self._pieces += rows
        else:
            with self._file.open("r+b") as opened:
                opened.seek(4 * self.length * len(self._sums))
                opened.write(pieces.numpy().tobytes())
        self._counts.append(len(rows))
        self._sums += [zlib.crc32(row.numpy().tobytes()) for row in rows]

    def _piece(self, number: int) -> Tensor:
        if self._file is None:
            return self._pieces[number].long()
        with self._file.open("rb") as opened:
            opened.seek(4 * self.length * number)
            found = opened.read(4 * self.length)
        if zlib.crc32(found) != self._sums[number]:
            raise ValueError(f"{self._file} is damaged: expected the tokens as written; delete it and run again")
        return torch.from_numpy(np.frombuffer(found, np.int32).astype(np.int64))

    def _in_turn(self) -> list[int]:
        """Return the numbers of the pieces after each document's first, from each corpus in turn."""
        by_corpus: dict[int, list[int]] = {}
        starts = itertools.accumulate(self._counts, initial=0)
        for document, start, count in zip(self._order, starts, self._counts, strict=False):
            by_corpus.setdefault(self._corpora[document], []).extend(range(start + 1, start + count))
        return list(in_turn(list(by_corpus.values())))

    def _write_index(self) -> None:
        assert self._file is not None
        index = {"key": self.key, "counts": self._counts, "sums": self._sums, "longest": self.longest}
        write_text(self._file.with_suffix(".json"), json.dumps(index) + "\n")

    def _reopen(self, file: Path) -> None:
        """Continue with what an earlier run has kept, if it is of the same key and complete."""
        try:
            index = read_json_object(file.with_suffix(".json"), "run again")
        except (FileNotFoundError, ValueError):
            return
        counts, sums = index.get("counts"), index.get("sums")
        if index.get("key") != self.key or not isinstance(counts, list) or not isinstance(sums, list):
            return
        whole = 4 * self.length * len(cast("list[int]", sums))
        if not file.is_file() or file.stat().st_size < whole:
            return
        self._counts, self._sums, self.longest = cast("list[int]", counts), cast("list[int]", sums), index["longest"]
        starts = itertools.accumulate(self._counts, initial=0)
        self._starts = [start for start, count in zip(starts, self._counts, strict=False) if count]
        self._file = file


def key_of(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, settings: dict[str, object]) -> str:
    """Identify token contexts by their documents, tokenizer and settings, JSON values that decide them, such as their
    length and the seed. Files count by size and modification time, unread."""
    texts = documents if isinstance(documents, Texts) else Texts([(one, one.corpus) for one in documents])
    fast = getattr(tokenizer, "backend_tokenizer", None)
    how = fast.to_str() if fast is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    decisive = [texts.identity, hashlib.sha256(how.encode()).hexdigest(), settings, version("tokenizers")]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def corpora(documents: Sequence[Document]) -> list[int]:
    """Return the corpus of each document, without reading any."""
    if isinstance(documents, Texts):
        return [corpus for _, corpus in documents.parts]
    return [document.corpus for document in documents]


def in_turn(lists: list[list[T]]) -> Iterator[T]:
    """Yield one item of each list in turn, until all are used."""
    longest = max(map(len, lists), default=0)
    return (items[number] for number in range(longest) for items in lists if number < len(items))


def _order(found: list[int], seed: int | None) -> list[int]:
    """Return the order in which documents are tokenised: shuffled, and from each corpus in turn."""
    order = list(range(len(found)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    return list(in_turn([[number for number in order if found[number] == corpus] for corpus in sorted(set(found))]))


def sweep(folder: Path, kept: Sequence[Path]) -> None:
    """Remove files of other contexts from the folder of kept ones."""
    mine = {path.with_suffix(suffix).name for path in kept for suffix in (".ids", ".json")}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in mine:
            os.unlink(path)
