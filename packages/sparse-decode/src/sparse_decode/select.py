"""The `Selector` protocol, which chooses the tokens each row attends to; selectors by hash codes, and without."""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import hashcore
import torch
from hashcore.validation import require_short_scores
from hashtrain import Hasher, HasherConfig, ModelShape
from torch import Tensor

from sparse_decode.cpu import encode
from sparse_decode.cuda import encode as encode_cuda
from sparse_decode.cuda.encode_weights import Placed, code_shape, place
from sparse_decode.intervals import visible

_WIDENED = 1 << 28  # bytes of keys that the oracle converts to float32 per chunk


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


# ---- Selectors by hash codes -----------------------------------------------------------------------------------------


@runtime_checkable
class KeyQueryHasher(Protocol):
    """The methods that a hasher needs; `hashtrain.Hasher` has them."""

    def encode_keys(self, layer: int, k: Tensor, /) -> Tensor:
        """Hash keys [B, Hkv, T, D] to int32 codes [B, H, T, W]."""
        ...

    def encode_queries(self, layer: int, q: Tensor, /) -> tuple[Tensor, tuple[int, ...]]:
        """Hash queries [B, Hq, T, D] to int32 planes [B, H, T, P, W] and the planes' weights.

        Also queries that are not finite: an error would stop all sequences of the batch.
        """
        ...

    def require_match(self, model_config: Any) -> None:
        """Raise ValueError if this hasher was made for another model."""


_FACTS = frozenset({"dense_layers", "reach", "adapter", "layer_shares", "head_shares", "remainder"})


class HashSelector:
    """Selects by plane scores between query planes and key codes (eq. 4 and 6), of any hasher.

    A `hashtrain.Hasher` is read once: its layers are copied to the devices of the keys, or their memory is used where
    it is there already. Its weights must not change afterwards. A copy of a selector reads them anew.

    Args: hasher: a `hashtrain.Hasher`, or another `KeyQueryHasher`; per_query_head: codes and selections per query head
        of a `hashtrain.Hasher`, not per KV head: the paper's protocol.
    """

    needs_codes = True

    def __init__(self, hasher: KeyQueryHasher, per_query_head: bool = False):
        if per_query_head and not isinstance(hasher, Hasher):
            raise ValueError(f"codes per query head need a hashtrain.Hasher, got {type(hasher).__name__}")
        self.hasher: KeyQueryHasher = hasher
        self.per_query_head: bool = per_query_head or bool(getattr(hasher, "per_query_head", False))
        """Whether every query head has its own index set."""
        self.is_ours: bool = isinstance(hasher, Hasher) and type(self) in (HashSelector, LshSelector)
        """Whether all it does is to apply a `hashtrain.Hasher`, which the kernels can do: a subclass may do more."""
        self._placed: dict[tuple[int, torch.device], Placed] = {}

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS:
            return getattr(self.hasher, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_placed": {}}

    def require_match(self, model_config: Any) -> None:
        self.hasher.require_match(model_config)

    def placed(self, layer: int, device: torch.device) -> Placed:
        """Return a layer of a `hashtrain.Hasher` on a device."""
        known = self._placed.get((layer, device))
        if known is None:
            known = self._placed[layer, device] = place(cast(Hasher, self.hasher).layer(layer), device)
        return known

    @torch.no_grad()
    def encode_keys(self, layer: int, k: Tensor) -> Tensor:
        if not isinstance(self.hasher, Hasher):
            return self.hasher.encode_keys(layer, k)
        own = self.of_keys(layer, k)
        if encode_cuda.supports(own, k):
            heads, words = code_shape(own.layer, self.per_query_head)
            codes = k.new_empty(k.shape[0], heads, k.shape[2], words, dtype=torch.int32)
            encode_cuda.tokens(own, self.per_query_head, k, codes)
            return codes
        if own.views is None or not encode.supports(k):
            return _folded(k, own.layer.encode_keys(_folded(k, k), per_query_head=self.per_query_head))
        codes = encode.hash_keys(own.views, k)
        return codes.repeat_interleave(own.layer.group, 1) if self.per_query_head else codes

    @torch.no_grad()
    def encode_queries(self, layer: int, q: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Hash queries [B, Hq, T, D] of one layer to int32 planes [B, H, T, P, W] and the planes' weights."""
        if not isinstance(self.hasher, Hasher):
            planes, weights = self.hasher.encode_queries(layer, q)
            require_short_scores(planes.shape[-1], weights)
            return planes, weights
        own = self.placed(layer, q.device)
        if encode_cuda.supports(own, q):
            return encode_cuda.tokens(own, self.per_query_head, q=q)
        if own.views is None or not encode.supports(q):
            planes, weights = own.layer.encode_queries(_folded(q, q), per_query_head=self.per_query_head)
            return _folded(q, planes), weights
        return encode.hash_queries(own.views, q, self.per_query_head)

    def write_codes(self, layer: int, k: Tensor, codes: Tensor, at: Tensor | None) -> bool:
        """Hash keys [B, Hkv, T, D] into codes [B, H, N, W], from token `at` on, int64 []; None: into all of them.

        Returns: whether one operator does this; if not, nothing was written.
        """
        if not self.is_ours or not encode_cuda.supports(own := self.of_keys(layer, k), k):
            return False
        encode_cuda.tokens(own, self.per_query_head, k, codes, at)
        return True

    @torch.no_grad()
    def encode_step(self, layer: int, k: Tensor, codes: Tensor, q: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
        """Hash the new keys of a step [B, Hkv, 1, D] into codes [B, H, 1, W], and its queries [B, Hq, 1, D], at once.

        Returns: planes and weights as `encode_queries`; None if one operator does not do it: nothing was written.
        """
        if not self.is_ours or not encode_cuda.supports(own := self.of_keys(layer, k), k):
            return None
        return encode_cuda.tokens(own, self.per_query_head, k, codes, q=q)

    def traceable(self, layer: int, x: Tensor) -> bool:
        """Whether keys or queries [B, H, T, D] are hashed by operators alone, which a compiled graph can contain."""
        return self.is_ours and x.device.type == "cuda" and encode_cuda.supports(self.placed(layer, x.device), x)

    def of_keys(self, layer: int, k: Tensor) -> Placed:
        """Return a layer on the device of its keys [B, Hkv, T, D], after checking their heads."""
        own = self.placed(layer, k.device)
        if k.shape[1] != own.layer.hkv:
            raise ValueError(
                f"layer {layer} must have the {own.layer.hkv} KV heads that the hasher is for, got keys of "
                f"{k.shape[1]}; the head count in the model's config is wrong"
            )
        return own

    def select(self, rows: Rows) -> Tensor:
        if rows.codes is None:
            raise ValueError("a hash selector needs the codes of the keys, got None")
        planes, weights = self.encode_queries(rows.layer, rows.q)
        counts = rows.counts if rows.counts.ndim == 3 else rows.counts[:, None]
        keys, counts = rows.codes[:, :, None], counts.expand(planes.shape[:3])
        starts, lengths = (x[:, None] for x in rows.span.unbind(-1))
        how: dict[str, Any] = {"sink": rows.sink, "recent": rows.recent, "order": "index"}
        return hashcore.search(planes, keys, counts, weights, starts=starts, lengths=lengths, **how)[1]


def _folded(x: Tensor, found: Tensor) -> Tensor:
    """Swap sequences and tokens of a tensor if x [B, H, T, D] is a step, T = 1, of which there may be many sequences.

    As tokens of one sequence they are one product for each head. Of many sequences torch copies the matrices for each.
    """
    return found.transpose(0, 2) if x.shape[2] == 1 else found


class LshSelector(HashSelector):
    """Selects by untrained locality-sensitive hashes: the signs of a random rotation per KV head.

    Args: model_config: of the Hugging Face model; bits: of a code, a multiple of 32; seed: of the rotations;
        per_query_head: one index set per query head instead of one per KV head.
    """

    def __init__(self, model_config: Any, bits: int = 128, seed: int = 0, per_query_head: bool = False):
        super().__init__(Hasher(HasherConfig("lsh", ModelShape.of(model_config), bits=bits), seed), per_query_head)


# ---- Selectors without codes -----------------------------------------------------------------------------------------


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


class OracleSelector(NoCodes):
    """Selects by the exact attention probabilities (eq. 9), as a perfect selector would.

    Args: per_query_head: one index set per query head; by default one per KV head, by its group's summed probabilities.
    """

    def __init__(self, per_query_head: bool = False):
        self.per_query_head = per_query_head

    def select(self, rows: Rows) -> Tensor:
        (batch, hq, n_rows, dim), (hkv, n) = rows.q.shape, rows.k.shape[1:3]
        grouped = rows.q.detach().float().reshape(batch, hkv, -1, dim)
        tokens = n if rows.k.dtype == torch.float32 else max(1, _WIDENED // (4 * rows.k[:, :, :1].numel() + 1))
        chunks = cast("tuple[Tensor, ...]", rows.k.detach().split(tokens, dim=2))
        parts = [grouped @ chunk.float().transpose(-1, -2) for chunk in chunks]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        logits = logits.mul_(rows.scaling).view(batch, hq, n_rows, n)
        if rows.softcap is not None:
            logits = logits.div_(rows.softcap).tanh_().mul_(rows.softcap)
        logits.masked_fill_(~rows.visible, -torch.inf)
        p = logits.softmax(-1)
        if rows.sinks is not None:  # a head's sink takes part of its probability, the same for every token
            p *= (logits.logsumexp(-1, keepdim=True) - rows.sinks.float()[:, None, None]).sigmoid()
        if not self.per_query_head:
            p = cast(Tensor, p.unflatten(1, (hkv, hq // hkv))).sum(2)
        p = p.masked_fill_(~rows.candidates(), -1.0)  # below every candidate, even if p rounds to 0
        return best_floats(p, rows.counts[:, None].expand(p.shape[:-1]))


def best_floats(values: Tensor, counts: Tensor) -> Tensor:
    """Return the indices of the largest values of each row.

    Args:
        values: float32 [..., N] without NaN.
        counts: number of indices per row, integers [...], at most N.
    Returns: int64 [..., K], K the largest count: ascending indices, then -1; ties go to the lowest index.
    """
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0
    return hashcore.topk(torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits), counts)[1]  # integers of the same order
