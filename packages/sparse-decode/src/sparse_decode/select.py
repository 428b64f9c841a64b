"""Which tokens each row attends to: the `Selector` protocol and the selectors that need nothing but the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import hashcore
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from torch import Tensor

from sparse_decode import encode_cuda
from sparse_decode.encode import FewTokens, takes
from sparse_decode.parallel import PlacedHasher, shard
from sparse_decode.positions import between, last_visible, visible_span


@dataclass(frozen=True)
class Rows:
    """What a selector is asked about: some query rows of one layer.

    Attributes:
        layer: index of the layer in the model.
        q: queries, [B, Hq, Q, D]; k: the keys they may see, [B, Hkv, N, D]; both after RoPE.
        codes: the keys' codes, int32 [B, H, N, W]; None if the selector needs none.
        visible: bool [B, 1, Q, N], the tokens each row sees; None means that every row sees every token.
        counts: int64 [B, Q], tokens to select; at most the row's candidates, 0 for rows that are not sparse.
        scaling: the model's factor on attention logits.
        softcap: the bound of its soft-capped logits, or None.
        sinks: its learned sink logits, one per query head [Hq], or None.
        each: what every row selects, where `counts` is the same for all; None where that is not known.
        sink, recent: the first and the last tokens that each row sees are read anyway: the candidates are the others.
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
    each: int | None = None
    sink: int = 0
    recent: int = 0

    def candidates(self) -> Tensor | None:
        """Say which tokens each row may select, bool [B or 1, 1, Q, N]; None for every token."""
        return between(self.visible, self.sink, self.recent, self.q.shape[2], self.k.shape[2], self.q.device)


@runtime_checkable
class Selector(Protocol):
    """Chooses tokens.

    The result of `select` is int64 [B, H, Q, K], H = Hkv or Hq: in each row `counts` candidates in ascending order,
    then -1. Equal scores go to the lowest index. For a model split over tensor-parallel ranks it needs a further
    method, `shard(rank, size)`, which returns the selector of one rank's heads.
    """

    needs_codes: bool
    """Whether the cache must carry the codes of `encode_keys`."""

    def require_match(self, model_config: Any) -> None:
        """Raise ValueError if this selector was made for another model."""
        ...

    def encode_keys(self, layer: int, k: Tensor) -> Tensor:
        """Hash keys [B, Hkv, T, D] of one layer to int32 codes [B, H, T, W]; called only if `needs_codes`."""
        ...

    def select(self, rows: Rows) -> Tensor:
        """Choose tokens, [B, H, Q, K]."""
        ...


@runtime_checkable
class AttendingSelector(Selector, Protocol):
    """A selector that also weighs what it selected, as one that samples must. It has no remainder.

    What is always read is its own affair too: its rows have `sink` and `recent` 0, and `counts` is the whole budget.
    """

    def attend(self, rows: Rows, v: Tensor, indices: Tensor) -> Tensor:
        """Attend to the selected tokens of v [B, Hkv, N, Dv]: [B, Q, Hq, Dv] in q's type, zeros without a token.

        Args:
            rows: what `select` was given.
            indices: what it returned, int64 [B, H, Q, K].
        """
        ...


@runtime_checkable
class KeyQueryHasher(Protocol):
    """What is needed of a hasher; `hashtrain.Hasher` is one."""

    def encode_keys(self, layer: int, k: Tensor, /) -> Tensor:
        """Hash keys [B, Hkv, T, D] to int32 codes [B, H, T, W]."""
        ...

    def encode_queries(self, layer: int, q: Tensor, /) -> tuple[Tensor, tuple[int, ...]]:
        """Hash queries [B, Hq, T, D] to int32 planes [B, H, T, P, W] and the planes' weights."""
        ...

    def require_match(self, model_config: Any) -> None:
        """Raise ValueError if this hasher was made for another model."""
        ...


class HashSelector:
    """Selects by plane score between query planes and key codes (eq. 4 and 6): learned hashes, LSH, the paper's.

    Args:
        hasher: a `hashtrain.Hasher`, whose weights follow the keys to their device, or another `KeyQueryHasher`.
    """

    needs_codes = True
    chooses_all_asked = True
    """Each row gets exactly `counts` candidates: what is always read need not be looked for among them. A selector of
    yours may say the same."""

    def __init__(self, hasher: KeyQueryHasher):
        self.hasher = hasher
        self._encoder: KeyQueryHasher = PerHead(hasher) if isinstance(hasher, Hasher) else hasher

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers that the hasher wants dense."""
        return getattr(self.hasher, "dense_layers", ())

    def require_match(self, model_config: Any) -> None:
        self.hasher.require_match(model_config)

    def shard(self, rank: int, size: int) -> HashSelector:
        """Return the selector of one tensor-parallel rank, sliced by KV head."""
        return HashSelector(shard(self.hasher, rank, size))

    def encode_keys(self, layer: int, k: Tensor) -> Tensor:
        with torch.no_grad():
            return self._encoder.encode_keys(layer, k)

    @property
    def per_query_head(self) -> bool:
        """Whether every query head has a set of its own."""
        return bool(getattr(self._encoder, "per_query_head", False))

    def remainder(self, layer: int) -> Tensor | None:
        """Return the coefficients of eq. 15, [Hq, 5], if the hasher has been calibrated."""
        found = getattr(self.hasher, "remainder", None)
        return None if found is None else found(layer)

    def select(self, rows: Rows) -> Tensor:
        if rows.codes is None:
            raise ValueError("a hash selector needs the codes of the keys, got None")
        with torch.no_grad():
            planes, weights = self._encoder.encode_queries(rows.layer, rows.q)
        keys, counts = rows.codes[:, :, None], rows.counts[:, None]
        how: dict[str, Any] = {"sink": rows.sink, "recent": rows.recent, "order": "index"}
        if rows.each is not None and rows.visible is None:  # nothing that differs by row has to be looked at
            return hashcore.search(planes, keys, rows.each, weights, **how)[1]
        span = visible_span(rows.visible, rows.k.shape[2])
        if span is not None:  # one pass, and no scores of the full length
            starts, lengths = (x if isinstance(x, int) else x[:, None] for x in span)
            counts = counts.expand(planes.shape[:3])
            return hashcore.search(planes, keys, counts, weights, starts=starts, lengths=lengths, **how)[1]
        candidates = rows.candidates()
        assert candidates is not None
        scores = hashcore.score(planes, keys, weights=weights)
        scores = scores.masked_fill_(~candidates, -1)  # below every score; counts never reach them
        return hashcore.topk(scores, counts.expand(scores.shape[:-1]))[1]


class LshSelector(HashSelector):
    """Selects by untrained locality-sensitive hashes: signs of a random rotation per KV head.

    Args:
        model_config: the Hugging Face config of the model.
        bits: bits of a code, a multiple of 32.
        seed: draws the rotations.
        per_query_head: one set per query head instead of one per KV head.
    """

    def __init__(self, model_config: Any, bits: int = 128, seed: int = 0, per_query_head: bool = False):
        hasher = Hasher(HasherConfig("lsh", ModelShape.of(model_config), bits=bits), seed)
        super().__init__(QueryHeadHasher(hasher) if per_query_head else hasher)


class PerHead:
    """A `hashtrain.Hasher` as it is deployed: codes per KV head, weights on the device of the keys."""

    per_query_head = False

    def __init__(self, hasher: Hasher):
        self.hasher: Hasher = hasher
        self._placed = PlacedHasher(hasher)
        self._few = FewTokens()

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers that the hasher wants dense."""
        return self.hasher.dense_layers

    def encode_keys(self, layer: int, k: Tensor, /) -> Tensor:
        """Hash keys [B, Hkv, T, D] to int32 codes [B, H, T, W]."""
        own = self._placed.layer(layer, k.device)
        if k.shape[1] != own.hkv:
            raise ValueError(
                f"layer {layer} must have the {own.hkv} KV heads that the hasher is for, got keys of {k.shape[1]}; the "
                "model's config does not say how many it has"
            )
        if encode_cuda.takes(own, k):
            codes = encode_cuda.keys(own, k)  # pyright: ignore[reportArgumentType]
        elif takes(own, k):
            codes = self._few.keys(own, k)
        else:
            return own.encode_keys(k, per_query_head=self.per_query_head)
        return codes.repeat_interleave(own.group, 1) if self.per_query_head else codes

    def encode_queries(self, layer: int, q: Tensor, /) -> tuple[Tensor, tuple[int, ...]]:
        """Hash queries [B, Hq, T, D] to int32 planes [B, H, T, P, W] and the planes' weights."""
        own = self._placed.layer(layer, q.device)
        if encode_cuda.takes(own, q):
            return encode_cuda.queries(own, q, self.per_query_head)  # pyright: ignore[reportArgumentType]
        if not takes(own, q):
            return own.encode_queries(q, per_query_head=self.per_query_head)
        return self._few.queries(own, q, self.per_query_head)

    def remainder(self, layer: int) -> Tensor | None:
        """Return the hasher's coefficients of eq. 15, [Hq, 5], if it has been calibrated: they are per query head."""
        return self.hasher.remainder(layer)

    def require_match(self, model_config: Any) -> None:
        """Raise ValueError if the hasher is another model's, or keeps no codes."""
        if not self.hasher.layer(0).has_codes:
            raise ValueError(
                f"decoding needs a hasher that keeps codes, got variant {self.hasher.config.variant}; use another"
            )
        self.hasher.require_match(model_config)

    def shard(self, rank: int, size: int) -> PerHead:
        """Return the hasher of one tensor-parallel rank, sliced by KV head."""
        return type(self)(shard(self.hasher, rank, size))


class QueryHeadHasher(PerHead):
    """A `hashtrain.Hasher` with codes and selections per query head, not per KV head: the paper's protocol."""

    per_query_head = True


class NoCodes:
    """What the selectors that keep no codes share."""

    needs_codes = False

    def require_match(self, model_config: Any) -> None:
        """Accept every model."""

    def shard(self, rank: int, size: int) -> Any:
        """Return the selector of one tensor-parallel rank: itself, because it knows of no heads."""
        return self

    def encode_keys(self, layer: int, k: Tensor) -> Tensor:
        raise ValueError(f"{type(self).__name__} keeps no codes")


class RecentSelector(NoCodes):
    """Selects the last tokens that the row sees: a sliding window of the budget's size."""

    def select(self, rows: Rows) -> Tensor:
        chosen = last_visible(rows.candidates(), rows.counts, rows.k.shape[2])
        return chosen[:, None].expand(-1, rows.k.shape[1], -1, -1)
