"""The remainder: unselected tokens, added back as one token (docs/algorithm.md, eq. 15 and 16).

Its value is the mean of the visible values plus, for each query head, their covariance with the keys times the query.
Its weight is estimated from the mean of the visible keys. The sums behind these means are stored beside the cache. A
decode step reads them, with the covariance rounded to 8 bits, and the keys and values of the last tokens, which they do
not cover yet; every `FOLD` tokens these are added. On CUDA one launch of kernels/moments.cu does both.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hashcore.cuda import launch
from hashcore.cuda.kept import Table
from hashcore.cuda.kernels import Kept, make_launch
from torch import Tensor

from sparse_decode.attention.gather import KERNELS, OPERATORS, Run, operator, require
from sparse_decode.modes import ordinary_tensors, readable
from sparse_decode.positions import Seen
from sparse_decode.unselected.moments import MAX_GROUP, STATE, THREADS, Padding, Results, Sums, Token, defined, on_cpu
from sparse_decode.unselected.sums import FOLD, Moments, Rounded, means_of_rows

Tensors = Sequence[Tensor]


class Coefficients:
    """A layer's coefficients of the remainder, copied to a device when first asked for there.

    Args: fitted: `LayerHasher.remainder`, [Hq, 6].
    """

    def __init__(self, fitted: Tensor) -> None:
        self._fitted = fitted.float().clone()
        self.placed: dict[tuple[torch.device, float], tuple[Tensor, Tensor]] = {}
        """What `on` has returned, by its arguments."""

    def on(self, device: torch.device, scaling: float) -> tuple[Tensor, Tensor]:
        """Return the coefficients on a device, float32 [Hq, 5], and the slopes [Hq] times `scaling`."""
        if (known := self.placed.get((device, scaling))) is None:
            with ordinary_tensors():  # they outlive torch modes of this call
                placed = self._fitted.to(device)
                known = placed[:, :-1].contiguous(), placed[:, -1] * scaling
            self.placed[device, scaling] = known
        return known


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
        self._places: tuple[int, ...] = ()  # see `for_step`; found by the first step that asks

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
        found = means_of_rows(before, q, slopes, k, v, seen, first, last)
        self._put(before.join(Moments.of(k, v, seen, first, last, q.device)))
        self._note(seen, last)
        return found

    @torch.no_grad()
    def step(
        self, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, sight: Seen | None = None, length: Tensor | None = None
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
        return self._step_by(on_cpu, q, slopes, k, v, visible, shown) if self._same(shown, len(k)) else None

    def cover(self, q: Tensor, k: Tensor) -> bool:
        """Whether the sums are of all tokens of k but the last few, and lie where a step can read them."""
        sums = self._sums
        if sums is None or len(sums.keys) != len(k) or sums.keys.device != q.device:
            return False
        few = q.device.type == "cpu" or q.shape[1] <= MAX_GROUP * k.shape[1]
        return few and self.length < k.shape[2] <= self.length + FOLD

    @torch.no_grad()
    def step_on_device(
        self, q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the means of `step` on a GPU, if the sums `cover` the tokens; rows: none, or visible and shown."""
        return self._step_by(OPERATORS.add_token, q, slopes, k, v, *(rows or (None, None)))

    def _step_by(
        self, add: Callable[..., Tensors], q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        (visible, shown), sums = rows, self._sums
        assert sums is not None
        query, slopes, k, v = (x.detach() for x in (q[:, :, 0], slopes, k, v))
        before = *sums[1:], *self._for_steps(sums), self.length, visible, shown, self._seen
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

    def for_step(self, batch: int, n: int) -> tuple[int, ...] | None:
        """Return the addresses of sums of keys and values, and of the rounded spread and its scales.

        Returns: None if a step of n tokens without a mask cannot use the sums: they must be on the CPU and cover
            `length` tokens, all but the last few. After a step with `FOLD` new tokens, the caller calls `advance`.
        """
        sums = self._sums
        if sums is None or self._seen is not None or not self.length < n <= self.length + FOLD:
            return None
        if sums.keys.shape[0] != batch:
            return None
        if not self._places or self._places[0] != sums.keys.data_ptr():  # they are others in a deep copy
            found = sums.keys, sums.values, *self._for_steps(sums)
            if sums.keys.device.type != "cpu" or not all(x.is_contiguous() for x in found):
                return None
            self._places = tuple(x.data_ptr() for x in found)
        return self._places

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
            self._put(Moments(*map(change, self._sums)))
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


def add_token(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *sums: Any, run: Run | None = None) -> list[Tensor]:
    """Return the means of the last token's row (eq. 16), and the sums after it if `FOLD` tokens are new.

    Args:
        q: its queries, [B, Hq, D]; slopes: float32 [Hq], times the factor on the logits; k [B, Hkv, N, D] and v
            [B, Hkv, N, Dv], bfloat16 or float16 like q, with contiguous components.
        sums: keys, values and spread of the first tokens, as in `Moments`; levels and scales, as in `Rounded`; the
            number of these tokens; then, None for all: the number of visible tokens, int64 [B, 1]; the visible tokens,
            bool [B, N]; and the tokens that the sums cover, bool [B, their number or more].
    Returns: mean keys float32 [B, Hkv, D] and the values of eq. 16, float32 [B, Hq, Dv]; with `FOLD` new tokens also
        the sums over all, in the order of `Moments` and `Rounded`. On CUDA, if the sums do not cover the visible
        tokens of a row, all of these are NaN in at least one KV head.
    """
    outputs, rows = _empty(q, slopes, k, v, *sums), (*sums[6:], *(None,) * 5)[:5]
    launch_sums((q, slopes, k, v), sums[:5], outputs, rows, sums[5], run)
    return outputs


def launch_sums(
    given: Tensors, sums: Tensors, outputs: Tensors, rows: Sequence[Tensor | None], covered: int, run: Run | None
) -> None:
    """Run the kernel with these sums and outputs, in the order of its arguments; rows: those of `Padding`."""
    q, slopes, k, v = given
    if not len(q):
        return
    q, device = q.contiguous(), q.device
    visible, shown, before, length, summed = rows
    shown, before = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (shown, before))
    form = q.shape, q.dtype, device, k.shape, k.stride(), v.shape, v.stride(), _step(shown), _step(before)
    call = _calls.found.get(form) or _renewed(form, q, k, v)
    token, padding, into, to = call.token, call.padding, call.sums, call.results
    token.k, token.v, token.q, token.slopes = k.data_ptr(), v.data_ptr(), q.data_ptr(), slopes.data_ptr()
    token.summed = covered
    padding.visible, padding.shown, padding.before = _at(visible), _at(shown), _at(before)
    padding.length, padding.summed = _at(length), _at(summed)
    into.keys, into.values, into.spread, into.levels, into.scales = (x.data_ptr() for x in sums)
    to.mean_keys, to.rest, *state = (x.data_ptr() for x in outputs)
    to.tokens, to.keys, to.values, to.spread, to.levels, to.scales = state or (None,) * len(STATE)
    (launch.run if run is None else run)(call.launches, device, KERNELS)


class _Call(NamedTuple):
    """A prepared launch for one set of shapes and strides; each call only sets the addresses in its arguments."""

    token: Token
    padding: Padding
    sums: Sums
    results: Results
    launches: Kept

    def resize(self, n: int, keys: Sequence[int], values: Sequence[int], shown: int | None, before: int | None) -> bool:
        """Set the number of tokens and the strides, which do not change the grid; return True."""
        token, padding = self.token, self.padding
        token.tokens, padding.shown_batch, padding.before_batch = n, shown or 0, before or 0
        token.key_batch, token.key_head, token.key_token = keys[:3]
        token.value_batch, token.value_head, token.value_token = values[:3]
        return True


_calls: Table[_Call] = Table()


def _renewed(form: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> _Call:
    """Return the launch for a form: that of the previous length, updated, or a new one."""
    (batch, heads, n, dim), value_dim, strides = k.shape, v.shape[3], (form[4], *form[6:])
    kind, group = (*form[:3], batch, heads, dim, value_dim), q.shape[1] // heads
    require(q.dtype, (dim, value_dim), group)

    def make() -> _Call:
        arguments, named = (
            (Token(kv_heads=heads, group=group), Padding(), Sums(), Results()),
            defined(dim, value_dim, q.dtype),
        )
        grid = batch * heads, 1
        launch = make_launch("moments.cu", "add_token", grid, THREADS, arguments, named, programmatic=True)
        call = _Call(*arguments, Kept([launch]))
        call.resize(n, *strides)
        return call

    return _calls.renew(form, kind, n, lambda made: made.resize(n, *strides), make)


def _step(x: Tensor | None) -> int | None:
    """Return the stride from one row to the next, in elements."""
    return None if x is None else x.stride(0)


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _empty(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *sums: Any) -> list[Tensor]:
    """Return tensors of the shapes that `add_token` returns; also its fake implementation."""
    *state, summed = sums[:6]
    means = list(empty_means(q, v, state[0]))
    if k.shape[2] != summed + FOLD:
        return means
    after = (x.new_empty(*x.shape) for x in state)  # `*shape` takes a third less time than a tuple
    return [*means, state[0].new_empty(len(q)), *after]


def empty_means(q: Tensor, v: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return tensors for mean keys [B, Hkv, D] and values [B, Hq, Dv]; keys: their sums."""
    return (q.new_empty(*keys.shape, dtype=torch.float32), q.new_empty(*q.shape[:2], v.shape[-1], dtype=torch.float32))


operator(
    "add_token(Tensor q, Tensor slopes, Tensor k, Tensor v, Tensor keys, Tensor values, Tensor spread, Tensor levels, "
    "Tensor scales, SymInt summed, Tensor? visible, Tensor? shown, Tensor? before) -> Tensor[]",
    _empty,
    cpu=on_cpu,
    cuda=add_token,
)
