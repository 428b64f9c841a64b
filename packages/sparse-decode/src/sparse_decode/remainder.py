"""The remainder: unselected tokens, added back as one token (docs/algorithm.md, eq. 15 and 16).

Its value is the mean of the visible values plus, for each query head, their covariance with the keys times the query.
Its weight is estimated from the mean of the visible keys. The sums behind these means are stored beside the cache. A
decode step reads them, with the covariance rounded to 8 bits, and the keys and values of the last tokens, which they do
not cover yet; every `FOLD` tokens these are added.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparse_decode import moments
from sparse_decode.modes import ordinary_tensors, readable
from sparse_decode.positions import Seen
from sparse_decode.sums import FOLD, Moments, Rounded, count_shown, deviations, shown_tokens


class Coefficients:
    """A layer's coefficients of the remainder, copied to a device when first asked for there.

    Args: fitted: `LayerHasher.remainder`, [Hq, 6].
    """

    def __init__(self, fitted: Tensor) -> None:
        self._fitted = fitted.float().clone()
        self._placed: dict[tuple[torch.device, float], tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device, scaling: float) -> tuple[Tensor, Tensor]:
        """Return the coefficients on a device, float32 [Hq, 5], and the slopes [Hq] times `scaling`."""
        if (known := self._placed.get((device, scaling))) is None:
            with ordinary_tensors():  # they outlive torch modes of this call
                placed = self._fitted.to(device)
                known = placed[:, :-1].contiguous(), placed[:, -1] * scaling
            self._placed[device, scaling] = known
        return known

    def are_on(self, device: torch.device, scaling: float) -> bool:
        """Whether they have been asked for there."""
        return (device, scaling) in self._placed


class RunningMoments:
    """Sums over the first tokens of each sequence of a batch, without padding.

    Each call gets all keys and values and reads only those of tokens that are not summed yet.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Discard the sums; the next call recomputes them."""
        self.length: int = 0
        """Tokens summed so far, padding included."""
        self._put(None)
        self._seen: Tensor | None = None

    def _put(self, sums: Moments | None) -> None:
        """Replace the sums, which are never changed in place: copies may share them."""
        self._sums: Moments | None = sums
        self._rounded: Rounded | None = None  # made by the first step that reads it

    @torch.no_grad()
    def rows(
        self, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean keys and values of the tokens that rows first..last-1 see: their own and all earlier ones.

        Args:
            q: queries of the rows, [B, Hq, R, D]; slopes: per query head, times the factor on the logits, [Hq].
            k, v: all keys [B, Hkv, N, D] and values [B, Hkv, N, Dv]; seen: bool [B, N], False for padding, or None.
        Returns: float32 mean keys [B, Hkv, R, D] and values [B, Hq, R, Dv] of eq. 16; numbers of tokens [B, R].
        """
        before = self.advance(k, v, seen, first, q.device)
        counts = before.tokens.long()[:, None] + count_shown(q, seen, first, last)
        visible = counts.clamp(min=1)[:, None, :, None]
        centres = [mean[:, :, None] for mean in before.means()]
        mean_k, mean_v = (
            (total[:, :, None] + shown_tokens(x, seen, first, last, q.device).cumsum(2)) / visible
            for total, x in ((before.keys, k), (before.values, v))
        )
        drift_k, drift_v = ((mean - centre).float() for mean, centre in zip((mean_k, mean_v), centres, strict=True))
        new_k, new_v = (
            deviations(x, c[:, :, 0], seen, first, last)[:, :, None] for x, c in zip((k, v), centres, strict=True)
        )
        grouped = (q.float() * slopes[:, None, None]).unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, R, D]
        products = grouped @ before.spread[:, :, None] + (grouped @ new_k.mT).tril() @ new_v
        tilt = (
            products / visible[:, :, None] - (grouped * drift_k[:, :, None]).sum(-1, keepdim=True) * drift_v[:, :, None]
        )
        self._put(before.join(Moments.of(k, v, seen, first, last, q.device)))
        self._note(seen, last)
        return mean_k.float(), (mean_v.float()[:, :, None] + tilt).float().flatten(1, 2), counts

    @torch.no_grad()
    def step(
        self,
        q: Tensor,
        slopes: Tensor,
        k: Tensor,
        v: Tensor,
        sight: Seen | None = None,
        length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Return the means of `rows` for the last row with one kernel, if the sums cover all but the last few tokens.

        The covariance is rounded (`Rounded`).

        Args: as in `rows`; sight: what the rows see, None for all.
        Returns: None if `rows` is needed: more than `FOLD` tokens are new, or the mask of earlier tokens has changed.
            On a GPU the host does not read the mask; if it has changed, the result is NaN, and so are the next sums.
        """
        shown, visible = (None, None) if sight is None else (sight.tokens, sight.visible)
        if not self.cover(q, k):
            return None
        if not readable(q):
            return self.step_on_device(q, slopes, k, v, visible, shown)
        # Without torch's dispatcher.
        return self._step(moments.on_cpu, q, slopes, k, v, visible, shown) if self._same(shown, len(k)) else None

    def cover(self, q: Tensor, k: Tensor) -> bool:
        """Whether the sums are of all tokens of k but the last few, and lie where a step can read them."""
        sums = self._sums
        if sums is None or len(sums.keys) != len(k) or sums.keys.device != q.device:
            return False
        few = q.device.type == "cpu" or q.shape[1] <= moments.MAX_GROUP * k.shape[1]
        return few and self.length < k.shape[2] <= self.length + FOLD

    @torch.no_grad()
    def step_on_device(
        self,
        q: Tensor,
        slopes: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor | None = None,
        shown: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the means of `step` on a GPU, if the sums `cover` the tokens. Args: as in `moments.add_token`."""
        return self._step(moments.OPERATORS.add_token, q, slopes, k, v, visible, shown)

    def _step(
        self,
        add: Callable[..., Sequence[Tensor]],
        q: Tensor,
        slopes: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor | None,
        shown: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        assert self._sums is not None
        query, slopes, k, v = (x.detach() for x in (q[:, :, 0], slopes, k, v))
        keys, values, spread, rounded = *self._sums[1:], self._for_steps(self._sums)
        before = keys, values, spread, *rounded, self.length, visible, shown, self._seen
        mean_keys, rest, *folded = add(query, slopes, k, v, *before)
        if folded:
            *found, levels, scales = folded
            self._put(Moments(*found))
            self._rounded = Rounded(levels, scales)
            self._note(shown, k.shape[2])
        return mean_keys[:, :, None], rest[:, :, None]

    def _for_steps(self, sums: Moments) -> Rounded:
        if self._rounded is None:
            with ordinary_tensors():  # it outlives torch modes of this call
                self._rounded = Rounded.of(sums.spread)
        return self._rounded

    def for_step(self, batch: int, n: int) -> tuple[Tensor, ...] | None:
        """Return sums of keys and values, and the rounded spread, if a step of n tokens without a mask can use them.

        They must be on the CPU and cover `length` tokens: all but the last few. Else: None. The caller calls `stepped`.
        """
        sums = self._sums
        if sums is None or self._seen is not None or not self.length < n <= self.length + FOLD:
            return None
        if len(sums.keys) != batch or sums.keys.device.type != "cpu":
            return None
        found = sums.keys, sums.values, *self._for_steps(sums)
        return found if all(x.is_contiguous() for x in found) else None

    def stepped(self, k: Tensor, v: Tensor, n: int) -> None:
        """Add the last tokens to the sums after a step of n tokens without a mask, if they are `FOLD`."""
        if n == self.length + FOLD:
            self.advance(k, v, None, n, k.device)

    def copied(self) -> RunningMoments:
        """Return a copy, which steps of this object do not change."""
        return copy.copy(self)

    def drop(self, k: Tensor, v: Tensor, length: int) -> None:
        """Subtract the tokens from `length` on from the sums; k and v must still contain them."""
        if length >= self.length:
            return
        if not length:
            return self.forget()
        assert self._sums is not None
        last = Moments.of(k, v, self._seen, length, self.length, self._sums.keys.device)
        self._put(self._sums.without(last))
        self._seen = None if self._seen is None else self._seen[:, :length]
        self.length = length

    def load(self, sums: Moments, seen: Tensor) -> None:
        """Continue from sums over the tokens marked in `seen` [B, T]."""
        self.length, self._seen = seen.shape[1], seen
        self._put(sums)

    def store(self, sums: Sequence[Tensor], seen: Tensor) -> None:
        """Write sums and rounded spread into tensors, and the counted tokens into the first columns of `seen`."""
        if self._sums is not None:
            for room, found in zip(sums, (*self._sums, *Rounded.of(self._sums.spread)), strict=True):
                room.copy_(found)
            seen[:, : self.length] = True if self._seen is None else self._seen

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change`, a function on the batch dimension, to the sums."""
        if self._sums is not None:
            rounded = self._rounded
            self._put(self._sums.map(change))
            self._rounded = None if rounded is None else Rounded(*map(change, rounded))
            self._seen = None if self._seen is None else change(self._seen)

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return sum(x.nbytes for x in (*(self._sums or ()), *(self._rounded or ())))

    def advance(self, k: Tensor, v: Tensor, seen: Tensor | None, length: int, device: torch.device) -> Moments:
        """Bring the sums up to token `length`; recompute them if they are of other tokens than `seen`."""
        if self.length > length or not self._same(seen, k.shape[0]):
            self.forget()
        if self._sums is None:
            self._put(Moments.of(k, v, seen, 0, length, device))
        elif self.length < length:
            self._put(self._sums.join(Moments.of(k, v, seen, self.length, length, device)))
        self._note(seen, length)
        assert self._sums is not None
        return self._sums

    def _note(self, seen: Tensor | None, length: int) -> None:
        """Record which tokens the sums cover."""
        self.length = length
        self._seen = None if seen is None else seen[:, :length]

    def _same(self, seen: Tensor | None, batch: int) -> bool:
        """Whether the tokens summed so far are those that are visible now."""
        if self._sums is None:
            return True
        if len(self._sums.keys) != batch:
            return False
        before, now = self._seen, None if seen is None else seen[:, : self.length]
        if before is None or now is None:  # without a mask all are visible
            return all(x is None or bool(x.all()) for x in (before, now))
        return torch.equal(before, now)


class StaticMoments:
    """The running sums of a static cache: buffers of fixed size, so that a compiled step updates them in place.

    Attributes:
        tensors: those of `Moments` and of `Rounded`; the counted tokens, bool [B, N]; and the number of tokens with
            padding, int64 [B, Hkv], equal everywhere: on CUDA each block reads and writes its own.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors: list[Tensor] = list(tensors)
        self.ready: bool = False
        """Whether the sums are known to cover all earlier tokens, so that a step need not check."""

    @classmethod
    def empty(cls, keys: Tensor, values: Tensor) -> StaticMoments:
        """Allocate sums of zero tokens for a cache of keys [B, Hkv, N, D] and values [B, Hkv, N, Dv]."""
        seen = keys.new_zeros(keys.shape[0], keys.shape[2], dtype=torch.bool)
        length = keys.new_zeros(max(1, len(keys)), keys.shape[1], dtype=torch.int64)
        sums = Moments.none(keys, values, keys.device)
        return cls([*sums, *Rounded.of(sums.spread), seen, length])

    @torch.no_grad()
    def rows(
        self, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, first: int, last: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the means as `RunningMoments.rows` does."""
        running = self._running()
        found = running.rows(q, slopes, k, v, seen, first, last)
        self._store(running)
        return found

    @torch.no_grad()
    def learn(self, k: Tensor, v: Tensor, seen: Tensor | None) -> None:
        """Add all tokens of a prompt's k and v that are `seen` [B, N]."""
        running = self._running()
        running.advance(k, v, seen, k.shape[2], k.device)
        self._store(running)

    def _running(self) -> RunningMoments:
        running = RunningMoments()
        *sums, _, _, counted, length = self.tensors
        if n := int(length[0, 0]):
            running.load(Moments(*sums), counted[:, :n])
        return running

    def _store(self, running: RunningMoments) -> None:
        *sums, counted, length = self.tensors
        running.store(sums, counted)
        length.fill_(running.length)
        self.ready = True

    @torch.no_grad()
    def step(
        self, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, sight: Seen | None, length: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Like `RunningMoments.step`, in place; `length`: number of tokens in the cache, int64 []."""
        if not self.ready or sight is None or length is None:
            return None
        if readable(q) and not self._serves(sight, int(length)):
            return None
        given = q[:, :, 0], slopes, k, v, *self.tensors, sight.visible, sight.tokens, length
        add = moments.on_cpu_in_place if readable(q) else moments.OPERATORS.add_in_place
        mean_keys, rest = add(*given)
        return mean_keys[:, :, None], rest[:, :, None]

    def _serves(self, sight: Seen, n: int) -> bool:
        """Whether the sums cover exactly what is visible of n tokens but the last few."""
        *_, counted, length = self.tensors
        at = int(length[0, 0])
        return at < n <= at + FOLD and torch.equal(counted[:, :at], sight.tokens[:, :at])

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change`, a reordering of the batch rows, to the sums."""
        for x in self.tensors[:-1]:
            x.copy_(change(x))

    def reset(self) -> None:
        """Reset the sums to zero tokens."""
        self.tensors[-1].zero_()
        self.ready = False

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return sum(x.nbytes for x in self.tensors)
