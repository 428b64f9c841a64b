"""The `Selector` protocol, which chooses the tokens each row attends to, and its basic implementations."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import hashcore
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from torch import Tensor

from sparse_decode.hashers import KeyQueryHasher, OfHasher, PerHead, QueryHeadHasher
from sparse_decode.intervals import visible


@dataclass(frozen=True)
class Rows:
    """The input of a selector: some query rows of one layer.

    Attributes:
        layer: index of the layer in the model.
        q: queries, [B, Hq, Q, D]; k: the keys they may see, [B, Hkv, N, D]; both after RoPE.
        codes: the keys' codes, int32 [B, H, N, W]; None if the selector needs none.
        interval: first and last (exclusive) of the tokens each row sees, int64 [B or 1, Q, 2]; None: all N.
        counts: int64 [B, Q], tokens to select; at most the row's candidates. With a budget by head, which only hash
            selectors get, [B, H, Q].
        scaling, softcap, sinks: as in `Inputs`.
        sink, recent: numbers of first and last visible tokens that are always read; the others are the candidates.
    """

    layer: int
    q: Tensor
    k: Tensor
    codes: Tensor | None
    interval: Tensor | None
    counts: Tensor
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    sink: int = 0
    recent: int = 0

    @property
    def by_head(self) -> Tensor:
        """`counts` as int64 [B, 1, Q] or, with a budget by head, [B, H, Q]."""
        return self.counts if self.counts.ndim == 3 else self.counts[:, None]

    @property
    def visible(self) -> Tensor:
        """Which tokens each row sees, bool [B or 1, 1, Q, N]."""
        return visible(self.span, self.k.shape[2])

    @property
    def span(self) -> Tensor:
        """The interval of each row, int64 [B or 1, Q, 2]."""
        if self.interval is not None:
            return self.interval
        n = self.k.shape[2]
        return torch.tensor([0, n], dtype=torch.int64, device=self.q.device).expand(1, self.q.shape[2], 2)

    def candidates(self) -> Tensor:
        """Return which tokens each row may select, bool [B or 1, 1, Q, N]."""
        ends = torch.tensor([self.sink, -self.recent], dtype=torch.int64, device=self.q.device)
        return visible(self.span + ends, self.k.shape[2])


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

    def __init__(self, hasher: KeyQueryHasher):
        self.hasher = hasher
        self._encoder: KeyQueryHasher = PerHead(hasher) if isinstance(hasher, Hasher) else hasher

    @property
    def own(self) -> PerHead | None:
        """Our hasher's functions; None for those of others, or if a subclass may do more than apply them."""
        plain = type(self) in (HashSelector, LshSelector)
        return self._encoder if plain and isinstance(self._encoder, PerHead) else None

    def require_match(self, model_config: Any) -> None:
        self.hasher.require_match(model_config)

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

    def select(self, rows: Rows) -> Tensor:
        if rows.codes is None:
            raise ValueError("a hash selector needs the codes of the keys, got None")
        planes, weights = self.encode_queries(rows.layer, rows.q)
        keys, counts = rows.codes[:, :, None], rows.by_head.expand(planes.shape[:3])
        starts, lengths = (x[:, None] for x in rows.span.unbind(-1))
        how: dict[str, Any] = {"sink": rows.sink, "recent": rows.recent, "order": "index"}
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

    def select(self, rows: Rows) -> Tensor:
        slots = torch.arange(int(rows.counts.max()) if rows.counts.numel() else 0, device=rows.q.device)
        first = (rows.span[..., 1] - rows.recent - rows.counts)[..., None]
        chosen = torch.where(slots < rows.counts[..., None], first + slots, -1)
        return chosen[:, None].expand(-1, rows.k.shape[1], -1, -1)
