"""The remainder's sums of a static cache: buffers of fixed size, to which a captured or compiled step adds in place."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparse_decode.attention.gather import OPERATORS, Run, operator
from sparse_decode.modes import readable
from sparse_decode.positions import Seen
from sparse_decode.unselected.moments import STATE, on_cpu_in_place
from sparse_decode.unselected.remainder import RunningMoments, empty_means, launch_sums
from sparse_decode.unselected.sums import FOLD, Moments, Rounded


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
    def empty(cls, keys: Tensor, values: Tensor) -> "StaticMoments":
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
        add = on_cpu_in_place if readable(q) else OPERATORS.add_in_place
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


def add_in_place(
    q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *rest: Tensor, run: Run | None = None
) -> tuple[Tensor, Tensor]:
    """Like `remainder.add_token`, for the last token of a static cache, in place.

    Args: as in `add_token`; rest: the tensors of a `StaticMoments`, visible and shown as there, and the number of
        tokens in the cache, int64 [].
    """
    *state, before, summed, visible, shown, length = rest
    means = empty_means(q, v, state[1])
    rows = visible, shown, before, length, summed
    launch_sums((q, slopes, k, v), state[1:], (*means, *state), rows, 0, run)
    return means


_NAMES = *STATE, "before", "summed"
_HELD = ", ".join(f"Tensor({mark}!) {name}" for mark, name in zip("abcdefgh", _NAMES, strict=True))
operator(
    f"add_in_place(Tensor q, Tensor slopes, Tensor k, Tensor v, {_HELD}, Tensor visible, Tensor shown, Tensor length) "
    "-> (Tensor, Tensor)",
    lambda q, slopes, k, v, tokens, keys, *_: empty_means(q, v, keys),
    cpu=on_cpu_in_place,
    cuda=add_in_place,
)
