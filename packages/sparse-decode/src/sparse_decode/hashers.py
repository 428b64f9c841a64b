"""Hashers as selectors use them: codes per KV head or per query head, by the fastest functions there are for a call."""

from typing import Any, Protocol, runtime_checkable

import torch
from hashtrain import Hasher
from hashtrain.layers import LayerHasher
from torch import Tensor

from sparse_decode.cpu.encode import CpuEncoder, supports
from sparse_decode.cuda import encode as encode_cuda
from sparse_decode.cuda.encode import PlacedHasher
from sparse_decode.cuda.encode_weights import code_shape


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


class OfHasher:
    """What wraps a hasher and says what it says of itself besides its functions, as `hashtrain.Hasher` does."""

    hasher: Any

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS:
            return getattr(self.hasher, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")


class PerHead(OfHasher):
    """Applies a `hashtrain.Hasher` in deployment: codes per KV head, weights on the device of the keys."""

    per_query_head = False

    def __init__(self, hasher: Hasher):
        self.hasher: Hasher = hasher
        self.placed: PlacedHasher = PlacedHasher(hasher)
        self._cpu_encoder = CpuEncoder()

    def encode_keys(self, layer: int, k: Tensor, /) -> Tensor:
        """Hash keys [B, Hkv, T, D] to int32 codes [B, H, T, W]."""
        own = self._of_keys(layer, k)
        if encode_cuda.supports(own, k):
            heads, words = code_shape(own, self.per_query_head)
            codes = k.new_empty(k.shape[0], heads, k.shape[2], words, dtype=torch.int32)
            encode_cuda.write_keys(own, k, codes, None)
            return codes
        if not supports(own, k):
            return own.encode_keys(k, per_query_head=self.per_query_head)
        codes = self._cpu_encoder.keys(own, k)
        return codes.repeat_interleave(own.group, 1) if self.per_query_head else codes

    def encode_queries(self, layer: int, q: Tensor, /) -> tuple[Tensor, tuple[int, ...]]:
        """Hash queries [B, Hq, T, D] to int32 planes [B, H, T, P, W] and the planes' weights."""
        own = self.placed.layer(layer, q.device)
        if encode_cuda.supports(own, q):
            return encode_cuda.queries(own, q, self.per_query_head)
        if not supports(own, q):
            return own.encode_queries(q, per_query_head=self.per_query_head)
        return self._cpu_encoder.queries(own, q, self.per_query_head)

    def write_codes(self, layer: int, k: Tensor, codes: Tensor, at: Tensor | None) -> bool:
        """Hash keys [B, Hkv, T, D] into codes [B, H, N, W], from token `at` on, int64 []; None: into all of them.

        Returns: whether one operator does this; if not, nothing was written.
        """
        own = self._of_keys(layer, k)
        if not encode_cuda.supports(own, k):
            return False
        encode_cuda.write_keys(own, k, codes, at)
        return True

    @torch.no_grad()
    def encode_step(self, layer: int, k: Tensor, codes: Tensor, q: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
        """Hash the new keys of a step [B, Hkv, 1, D] into codes [B, H, 1, W], and its queries [B, Hq, 1, D], at once.

        Returns: planes and weights as `encode_queries`; None if one operator does not do it: nothing was written.
        """
        if not encode_cuda.supports(own := self._of_keys(layer, k), k):
            return None
        return encode_cuda.step(own, k, codes, q, self.per_query_head)

    def _of_keys(self, layer: int, k: Tensor) -> LayerHasher:
        """Return the hasher of a layer on the device of its keys [B, Hkv, T, D], after checking their heads."""
        self.require_heads(layer, k)
        return self.placed.layer(layer, k.device)

    def require_heads(self, layer: int, k: Tensor) -> None:
        """Raise ValueError if the hasher is for another number of KV heads than that of keys [B, Hkv, T, D]."""
        if k.shape[1] != (heads := self.hasher.layer(layer).hkv):
            raise ValueError(
                f"layer {layer} must have the {heads} KV heads that the hasher is for, got keys of {k.shape[1]}; the "
                "head count in the model's config is wrong"
            )

    def traceable(self, layer: int, x: Tensor) -> bool:
        """Whether keys or queries [B, H, T, D] are hashed by operators alone, which a compiled graph can contain."""
        return encode_cuda.supports(self.placed.layer(layer, x.device), x)

    def require_match(self, model_config: Any) -> None:
        """Raise ValueError if the hasher is for another model, or stores no codes."""
        if not self.hasher.layer(0).has_codes:
            raise ValueError(
                f"decoding needs a hasher that stores codes, got variant {self.hasher.config.variant}; use another"
            )
        self.hasher.require_match(model_config)


class QueryHeadHasher(PerHead):
    """A `hashtrain.Hasher` with codes and selections per query head, not per KV head: the paper's protocol."""

    per_query_head = True
