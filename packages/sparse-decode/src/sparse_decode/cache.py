"""The cache layer that carries codes beside keys and values, through everything Hugging Face does to a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

Encoder = Callable[[Tensor], Tensor]
"""Keys [B, Hkv, T, D] -> int32 codes [B, H, T, W]; a plain function, which deep copies of a layer share."""

_CHUNK = 8192  # tokens hashed at once: a long prefill makes no full-length float32 temporary


class CodeBuffer:
    """Codes of the tokens seen so far, [B, H, capacity, W]; capacity doubles, so a step writes only its own codes."""

    def __init__(self) -> None:
        self._data: Tensor | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def view(self) -> Tensor:
        """Return the filled part, int32 [B, H, T, W], without a copy."""
        if self._data is None:
            raise ValueError("the code buffer is empty; append codes first")
        return self._data[:, :, : self._length]

    def append(self, codes: Tensor) -> None:
        """Write the codes of the next tokens, [B, H, t, W]."""
        end = self._length + codes.shape[2]
        if self._data is None or end > self._data.shape[2]:
            grown = codes.new_empty(*codes.shape[:2], max(end, 2 * self._length), codes.shape[3])
            if self._data is not None:
                grown[:, :, : self._length] = self.view()
            self._data = grown
        self._data[:, :, self._length : end] = codes
        self._length = end

    def truncate(self, length: int) -> None:
        """Forget the codes of tokens from `length` on."""
        self._length = min(self._length, length)
        if not self._length:
            self._data = None  # the next sequence may have another batch size

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the buffer by a change of its batch dimension."""
        if self._data is not None:
            self._data = change(self._data)


class CodedLayer(DynamicLayer):
    """A `DynamicLayer` whose `codes` are, at any moment, the codes of exactly the cached keys.

    Never constructed: `carry_codes` re-types a layer in place, so that the cache and every reference to it stay valid.
    """

    encode: Encoder
    buffer: CodeBuffer

    @property
    def codes(self) -> Tensor:
        """Codes of the cached keys, int32 [B, H, T, W]; keys not hashed so far are hashed now."""
        self._catch_up()
        return self.buffer.view()

    def _catch_up(self) -> None:
        length = self.get_seq_length()
        for start in range(len(self.buffer), length, _CHUNK):
            stop = min(start + _CHUNK, length)
            self.buffer.append(self.encode(self._keys()[:, :, start:stop]))

    def _keys(self) -> Tensor:
        assert self.keys is not None
        return self.keys

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, Hkv, t, D] and hash the new keys."""
        held = super().update(key_states, value_states, *args, **kwargs)
        self._catch_up()
        return held

    def crop(self, tokens_to_remove: int) -> None:
        """Drop tokens from the end, with their codes."""
        super().crop(tokens_to_remove)
        self.buffer.truncate(self.get_seq_length())

    def reset(self) -> None:
        """Empty the layer."""
        super().reset()
        self.buffer.truncate(0)

    def reorder_cache(self, beam_idx: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the batch rows `beam_idx`, as beam search asks."""
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]
        self.buffer.map_batch(lambda codes: codes.index_select(0, beam_idx.to(codes.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self.buffer.map_batch(lambda codes: codes.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the batch rows `indices`."""
        super().batch_select_indices(indices)
        self.buffer.map_batch(lambda codes: codes[indices, ...])


def carry_codes(layer: DynamicLayer, encode: Encoder) -> CodedLayer:
    """Make a dynamic layer carry the codes that `encode` gives, from its present keys on.

    Returns: the same object, re-typed. Keys cached before are hashed at first use.
    """
    if isinstance(layer, CodedLayer):
        if layer.encode is encode:
            return layer
    else:
        layer.__class__ = CodedLayer
    assert isinstance(layer, CodedLayer)
    layer.encode, layer.buffer = encode, CodeBuffer()
    return layer


def drop_codes(layer: CodedLayer) -> None:
    """Turn a layer back into the `DynamicLayer` that it was."""
    del layer.encode, layer.buffer
    layer.__class__ = DynamicLayer  # pyright: ignore[reportAttributeAccessIssue]
