"""The `Selector` protocol, which chooses the tokens each row attends to, and its basic implementations."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import hashcore
import torch
from hashcore.torch_ops import OPERATORS
from hashtrain import Hasher, HasherConfig, ModelShape
from torch import Tensor

from sparse_decode.hashing.encode_cuda import PlacedHasher
from sparse_decode.hashing.hashers import KeyQueryHasher, OfHasher, PerHead, QueryHeadHasher
from sparse_decode.modes import readable
from sparse_decode.positions import Span, visible_span


@dataclass(frozen=True)
class Rows:
    """The input of a selector: some query rows of one layer.

    Attributes:
        layer: index of the layer in the model.
        q: queries, [B, Hq, Q, D]; k: the keys they may see, [B, Hkv, N, D]; both after RoPE.
        codes: the keys' codes, int32 [B, H, N, W]; None if the selector needs none.
        visible: bool [B, 1, Q, N], the tokens each row sees; None means that every row sees every token.
        counts: int64 [B, Q], tokens to select; at most the row's candidates, 0 for rows that are not sparse. With a
            budget by head, which only hash selectors get, [B, H, Q].
        scaling: the model's factor on attention logits.
        softcap: the bound of its soft-capped logits, or None.
        sinks: its learned sink logits, one per query head [Hq], or None.
        uniform_count: the value of `counts` as an integer if it is the same for all rows; None if not known.
        most: an upper bound of `counts` in a decode step with a mask or a budget by head; None elsewhere.
        known_span: the result of `span`, if known already.
        sink, recent: numbers of first and last visible tokens that are always read; the others are the candidates.
        planes: the result of `HashSelector.encode_queries`, if known already.
    """

    layer: int
    q: Tensor
    k: Tensor
    codes: Tensor | None
    visible: Tensor | None
    counts: Tensor
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    uniform_count: int | None = None
    sink: int = 0
    recent: int = 0
    most: int | None = None
    known_span: Span | None = None
    planes: tuple[Tensor, tuple[int, ...]] | None = None

    @property
    def heads(self) -> int:
        """Number of index sets that `counts` distinguishes; 1 if all select as many tokens."""
        return self.counts.shape[1] if self.counts.ndim == 3 else 1

    @property
    def by_head(self) -> Tensor:
        """`counts` as int64 [B, 1, Q] or, with a budget by head, [B, H, Q]."""
        return self.counts if self.counts.ndim == 3 else self.counts[:, None]

    def span(self) -> Span:
        """Return the tokens that each row sees: starts and ends (exclusive), int64 [B or 1, Q] each.

        Raises: ValueError if the visible tokens of a row are not consecutive.
        """
        if self.known_span is not None:
            return self.known_span
        if self.visible is not None:
            return visible_span(self.visible)
        n, none = self.k.shape[2], torch.zeros(1, self.q.shape[2], dtype=torch.int64, device=self.q.device)
        return none, none + n

    def candidates(self) -> Tensor | None:
        """Return which tokens each row may select, bool [B or 1, 1, Q, N]; None for every token."""
        if not self.sink and not self.recent:
            return self.visible
        (start, end), slots = self.span(), torch.arange(self.k.shape[2], device=self.q.device)
        return ((slots >= start[..., None] + self.sink) & (slots < end[..., None] - self.recent))[:, None]


@runtime_checkable
class Selector(Protocol):
    """Chooses the tokens that each row reads.

    `select` returns int64 [B, H, Q, K], H = Hkv or Hq: in each row `counts` candidates in ascending order, then -1.
    Equal scores go to the lowest index.
    """

    needs_codes: bool
    """Whether the cache must carry the codes of `encode_keys`."""

    def require_match(self, model_config: Any) -> None:
        """Raise ValueError if this selector was made for another model."""

    def encode_keys(self, layer: int, k: Tensor) -> Tensor:
        """Hash keys [B, Hkv, T, D] of one layer to int32 codes [B, H, T, W]; called only if `needs_codes`."""
        ...

    def select(self, rows: Rows) -> Tensor:
        """Choose tokens, [B, H, Q, K]."""
        ...


@runtime_checkable
class AttendingSelector(Selector, Protocol):
    """A selector that also computes attention over its selection, as sampling methods must. It has no remainder.

    It also handles sink and recent tokens: its rows have `sink` and `recent` 0, and `counts` is the whole budget.
    """

    def attend(self, rows: Rows, v: Tensor, indices: Tensor) -> Tensor:
        """Attend to the selected tokens of v [B, Hkv, N, Dv]: [B, Q, Hq, Dv] in q's type, zeros without a token.

        Args: rows: the input of `select`; indices: its result, int64 [B, H, Q, K].
        """
        ...


class HashSelector(OfHasher):
    """Selects by plane scores between query planes and key codes (eq. 4 and 6), of any hasher.

    Args: hasher: a `hashtrain.Hasher`, whose weights are moved to the device of the keys, or another `KeyQueryHasher`.
    """

    needs_codes = True
    fills_counts = True
    """Each row gets exactly `counts` candidates and never a sink or recent token, so that the kernels can read those
    without a merge. Set this in your own selectors if it holds."""

    def __init__(self, hasher: KeyQueryHasher):
        self.hasher = hasher
        self._encoder: KeyQueryHasher = PerHead(hasher) if isinstance(hasher, Hasher) else hasher

    def require_match(self, model_config: Any) -> None:
        self.hasher.require_match(model_config)

    def require_heads(self, layer: int, k: Tensor) -> None:
        """Raise ValueError if our hasher is for another number of KV heads than that of keys [B, Hkv, T, D]."""
        if isinstance(self._encoder, PerHead):
            self._encoder.require_heads(layer, k)

    def encode_keys(self, layer: int, k: Tensor) -> Tensor:
        with torch.no_grad():
            return self._encoder.encode_keys(layer, k)

    def encode_queries(self, layer: int, q: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Hash queries [B, Hq, T, D] of one layer to int32 planes [B, H, T, P, W] and the planes' weights."""
        with torch.no_grad():
            return self._encoder.encode_queries(layer, q)

    @property
    def per_query_head(self) -> bool:
        """Whether every query head has its own index set."""
        return bool(getattr(self._encoder, "per_query_head", False))

    @property
    def placed(self) -> PlacedHasher | None:
        """Our hasher's functions by layer and device; None if this selector does more than apply them."""
        encoder = self._encoder
        return encoder.placed if type(self) is HashSelector and isinstance(encoder, PerHead) else None

    def write_codes(self, layer: int, k: Tensor, codes: Tensor, at: Tensor | None) -> bool:
        """Hash keys [B, Hkv, T, D] into codes [B, H, N, W], from token `at` on, int64 []; None: into all of them.

        Returns: whether the hasher supports writing in place; if not, nothing was written.
        """
        write = getattr(self._encoder, "write_codes", None)
        return write is not None and write(layer, k, codes, at)

    def encode_step(self, layer: int, k: Tensor, codes: Tensor, q: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
        """Hash the new keys of a step [B, Hkv, 1, D] into codes [B, H, 1, W], and its queries [B, Hq, 1, D], at once.

        Returns: planes and weights as `encode_queries`; None if one operator does not do it: nothing was written.
        """
        encoder = self._encoder if type(self).encode_queries is HashSelector.encode_queries else None
        with torch.no_grad():
            return encoder.encode_step(layer, k, codes, q) if isinstance(encoder, PerHead) else None

    def traceable(self, layer: int, x: Tensor) -> bool:
        """Whether operators that a compiled graph can contain hash a step's keys and queries [B, H, 1, D]."""
        return isinstance(self._encoder, PerHead) and self._encoder.traceable(layer, x)

    def select(self, rows: Rows) -> Tensor:
        if rows.codes is None:
            raise ValueError("a hash selector needs the codes of the keys, got None")
        planes, weights = rows.planes or self.encode_queries(rows.layer, rows.q)
        keys, counts = rows.codes[:, :, None], rows.by_head
        uniform = rows.uniform_count if rows.visible is None else None
        width = rows.most if rows.visible is None and uniform is None else uniform
        if width is not None and isinstance(self._encoder, PerHead):  # nothing has to be checked or read
            options = None, None, keys.shape[-2], 0, rows.sink, rows.recent, False, None
            return OPERATORS.search(planes, keys, width, counts if uniform is None else None, weights, *options)[1]
        how: dict[str, Any] = {"sink": rows.sink, "recent": rows.recent, "order": "index"}
        if uniform is not None:
            return hashcore.search(planes, keys, uniform, weights, **how)[1]
        starts, lengths = (x[:, None] for x in rows.span())
        if rows.most is not None and not readable(rows.q):  # the operator takes the number of slots as an argument
            bounds = lengths, starts, keys.shape[-2], 0, rows.sink, rows.recent
            return OPERATORS.search(planes, keys, rows.most, counts, weights, *bounds, False, None)[1]
        counts = counts.expand(planes.shape[:3])
        return hashcore.search(planes, keys, counts, weights, starts=starts, lengths=lengths, **how)[1]


class LshSelector(HashSelector):
    """Selects by untrained locality-sensitive hashes: the signs of a random rotation per KV head.

    Args: model_config: of the Hugging Face model; bits: of a code, a multiple of 32; seed: of the rotations;
        per_query_head: one index set per query head instead of one per KV head.
    """

    def __init__(self, model_config: Any, bits: int = 128, seed: int = 0, per_query_head: bool = False):
        hasher = Hasher(HasherConfig("lsh", ModelShape.of(model_config), bits=bits), seed)
        super().__init__(QueryHeadHasher(hasher) if per_query_head else hasher)


class NoCodes:
    """Base class of selectors that store no codes."""

    needs_codes = False

    def require_match(self, model_config: Any) -> None:
        """Accept every model."""

    def encode_keys(self, layer: int, k: Tensor) -> Tensor:
        raise ValueError(f"{type(self).__name__} stores no codes")


class RecentSelector(NoCodes):
    """Selects the last visible tokens: a sliding window of the budget's size."""

    fills_counts = True

    def select(self, rows: Rows) -> Tensor:
        if rows.uniform_count is not None and rows.visible is None:  # a step without a mask
            end = rows.k.shape[2] - rows.recent
            last = torch.arange(end - rows.uniform_count, end, device=rows.q.device)
            return last.expand(rows.q.shape[0], rows.k.shape[1], rows.q.shape[2], -1)
        slots = torch.arange(int(rows.counts.max()) if rows.counts.numel() else 0, device=rows.q.device)
        first = (rows.span()[1] - rows.recent - rows.counts)[..., None]
        chosen = torch.where(slots < rows.counts[..., None], first + slots, -1)
        return chosen[:, None].expand(-1, rows.k.shape[1], -1, -1)
