"""Which tokens each row attends to: the `Selector` protocol and the selectors that need nothing but the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import hashcore
import torch
import torch.nn.functional as F
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.layers import LayerHasher
from torch import Tensor

from sparse_decode import encode_cuda
from sparse_decode.encode import CpuEncoder, supports
from sparse_decode.parallel import PlacedHasher, shard
from sparse_decode.positions import between, last_visible, readable, visible_span


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
        uniform_count: what every row selects, where `counts` is the same for all; None where that is not known.
        most: no row selects more, in a decode step; None elsewhere.
        among: what `candidates` returns, where it is known already.
        sink, recent: the first and the last tokens that each row sees are read anyway: the candidates are the others.
        shortlist: that of the budget, for selectors that search.
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
    among: Tensor | None = None
    shortlist: int | None = None

    def candidates(self) -> Tensor | None:
        """Say which tokens each row may select, bool [B or 1, 1, Q, N]; None for every token."""
        if self.among is not None:
            return self.among
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
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

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

    def encode_queries(self, layer: int, q: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Hash queries [B, Hq, T, D] of one layer to int32 planes [B, H, T, P, W] and the planes' weights."""
        with torch.no_grad():
            return self._encoder.encode_queries(layer, q)

    @property
    def per_query_head(self) -> bool:
        """Whether every query head has a set of its own."""
        return bool(getattr(self._encoder, "per_query_head", False))

    def remainder(self, layer: int) -> Tensor | None:
        """Return the coefficients of eq. 15, [Hq, 5], if the hasher has been calibrated."""
        found = getattr(self.hasher, "remainder", None)
        return None if found is None else found(layer)

    def own_layer(self, layer: int, device: torch.device) -> LayerHasher | None:
        """Return the hash functions of a layer on a device, if all this selector does is to apply them per KV head."""
        encoder = self._encoder
        return encoder.own_layer(layer, device) if type(self) is HashSelector and type(encoder) is PerHead else None

    def write_codes(self, layer: int, k: Tensor, codes: Tensor, at: Tensor | None) -> bool:
        """Hash keys [B, Hkv, T, D] into codes [B, H, N, W], from token `at` on, int64 []; None: into all of them.

        Returns: whether it was done: only by a hasher that can do it where the codes lie.
        """
        write = getattr(self._encoder, "write_codes", None)
        return write is not None and write(layer, k, codes, at)

    def traceable(self, layer: int, x: Tensor) -> bool:
        """Say whether a step's keys and queries [B, H, 1, D] are hashed by operators that a compiled graph may hold."""
        return isinstance(self._encoder, PerHead) and self._encoder.traceable(layer, x)

    def select(self, rows: Rows) -> Tensor:
        if rows.codes is None:
            raise ValueError("a hash selector needs the codes of the keys, got None")
        planes, weights = self.encode_queries(rows.layer, rows.q)
        keys, counts = rows.codes[:, :, None], rows.counts[:, None]
        how: dict[str, Any] = {"sink": rows.sink, "recent": rows.recent, "order": "index", "shortlist": rows.shortlist}
        if rows.uniform_count is not None and rows.visible is None:  # nothing that differs by row has to be looked at
            return hashcore.search(planes, keys, rows.uniform_count, weights, **how)[1]
        if rows.most is not None and not readable(rows.q):  # whether a row sees one stretch cannot be looked at
            return self._among(rows, planes, keys, weights, rows.most)
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

    def _among(self, rows: Rows, planes: Tensor, keys: Tensor, weights: tuple[int, ...], most: int) -> Tensor:
        """Select among any candidates: `most` slots a row, however many it fills."""
        scores = hashcore.score(planes, keys, weights=weights)
        counts, candidates = self._step_of(rows, scores.shape[:-1])
        # By its operator: it takes the number of slots from us, where the function reads the largest count.
        how = most, counts, None, None, scores.shape[-1], 0, 0, 0
        return torch.ops.hashcore.topk(_hide(scores, candidates), *how)[1]

    def _step_of(self, rows: Rows, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return counts [B, H, 1] and candidates [B, 1, 1, N] as int32: once for all layers that are given the same."""
        known = self._last
        if torch.compiler.is_compiling() or known is None or known[0] is not rows.counts or known[1].shape != shape:
            candidates = rows.candidates()
            assert candidates is not None
            known = rows.counts, rows.counts[:, None].int().expand(shape).contiguous(), candidates.int()
            if not torch.compiler.is_compiling():
                self._last = known
        return known[1:]


def _hide(scores: Tensor, candidates: Tensor) -> Tensor:
    """Return scores [B, H, 1, N] plus one, 0 for tokens that are no candidates, in rows of whole fours.

    The kernel that selects reads four at a time.
    """
    n, more = scores.shape[-1], -scores.shape[-1] % 4
    if torch.compiler.is_compiling() or not more:
        found = torch.addcmul(candidates, scores, candidates)
        return F.pad(found, (0, more)) if more else found
    room = scores.new_empty(*scores.shape[:-1], n + more)
    torch.addcmul(candidates, scores, candidates, out=room[..., :n])
    return room


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
        self._cpu_encoder = CpuEncoder()

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers that the hasher wants dense."""
        return self.hasher.dense_layers

    def encode_keys(self, layer: int, k: Tensor, /) -> Tensor:
        """Hash keys [B, Hkv, T, D] to int32 codes [B, H, T, W]."""
        own = self._of_keys(layer, k)
        if _by_operators(own, k):
            codes = k.new_empty(*k.shape[:3], own.bits // 32, dtype=torch.int32)
            encode_cuda.write_keys(own, k, codes, None)  # pyright: ignore[reportArgumentType]
        elif supports(own, k):
            codes = self._cpu_encoder.keys(own, k)
        else:
            return own.encode_keys(k, per_query_head=self.per_query_head)
        return codes.repeat_interleave(own.group, 1) if self.per_query_head else codes

    def encode_queries(self, layer: int, q: Tensor, /) -> tuple[Tensor, tuple[int, ...]]:
        """Hash queries [B, Hq, T, D] to int32 planes [B, H, T, P, W] and the planes' weights."""
        own = self._placed.layer(layer, q.device)
        if _by_operators(own, q):
            return encode_cuda.queries(own, q, self.per_query_head)  # pyright: ignore[reportArgumentType]
        if not supports(own, q):
            return own.encode_queries(q, per_query_head=self.per_query_head)
        return self._cpu_encoder.queries(own, q, self.per_query_head)

    def write_codes(self, layer: int, k: Tensor, codes: Tensor, at: Tensor | None) -> bool:
        """Hash keys to where their codes lie, if one operator does it: `HashSelector.write_codes`."""
        own = self._of_keys(layer, k)
        if self.per_query_head or not _by_operators(own, k):
            return False
        encode_cuda.write_keys(own, k, codes, at)  # pyright: ignore[reportArgumentType]
        return True

    def own_layer(self, layer: int, device: torch.device) -> LayerHasher:
        """Return the hash functions of a layer on a device."""
        return self._placed.layer(layer, device)

    def _of_keys(self, layer: int, k: Tensor) -> LayerHasher:
        """Return the hasher of a layer where its keys [B, Hkv, T, D] are, if it is for as many KV heads."""
        own = self._placed.layer(layer, k.device)
        if k.shape[1] != own.hkv:
            raise ValueError(
                f"layer {layer} must have the {own.hkv} KV heads that the hasher is for, got keys of {k.shape[1]}; the "
                "model's config does not say how many it has"
            )
        return own

    def traceable(self, layer: int, x: Tensor) -> bool:
        """Say whether keys or queries [B, H, T, D] are hashed by operators alone, which a compiled graph may hold."""
        own = self._placed.layer(layer, x.device)
        return encode_cuda.fits(own, x) and (x.device.type == "cpu" or encode_cuda.supports(own, x))

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


def _by_operators(own: LayerHasher, x: Tensor) -> bool:
    """Say whether tokens are hashed by torch's operators of ours: on CUDA, and on the CPU in compiled graphs."""
    return encode_cuda.supports(own, x) or (torch.compiler.is_compiling() and encode_cuda.fits(own, x))


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

    chooses_all_asked = True

    def select(self, rows: Rows) -> Tensor:
        if rows.uniform_count is not None and rows.visible is None and rows.among is None:  # a step in which nothing is hidden
            end = rows.k.shape[2] - rows.recent
            last = torch.arange(end - rows.uniform_count, end, device=rows.q.device)
            return last.expand(rows.q.shape[0], rows.k.shape[1], rows.q.shape[2], -1)
        chosen = last_visible(rows.candidates(), rows.counts, rows.k.shape[2])
        return chosen[:, None].expand(-1, rows.k.shape[1], -1, -1)
