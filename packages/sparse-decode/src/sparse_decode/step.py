"""One step of one sparse layer, the only way through: hash, select, sum, attend.

    q [B, Hq, Q, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv], an interval [start, end) for each row -> out [B, Q, Hq, Dv]

1. Hash: the queries to planes, the new keys to codes (eq. 1 to 5).
2. Select: the `budget` best of the interval, without its sink and recent tokens, which are always read (eq. 6 and 7).
3. Sum: what the remainder needs of all visible tokens (eq. 16).
4. Attend: softmax over what was read, and the remainder as one more token (eq. 8 and 15).

On the CPU one kernel does steps 1 to 4 for one row of each sequence; for several rows it does step 4 only. On CUDA each
is an operator, which a graph can contain, and nothing waits: counts, intervals and sums stay on the device.
"""

import sys
import warnings
from typing import Any, cast

import numpy as np
import torch
from hashcore.cuda.launch import lane
from hashcore.torch_ops import OPERATORS as SEARCH
from hashtrain.data.offsets import beyond
from numpy.typing import NDArray
from torch import Tensor

from sparse_decode.budget import LayerBudget, Tally
from sparse_decode.caches.cache import Uncached
from sparse_decode.caches.cache_encoder import Encoder, register, registered
from sparse_decode.cpu.step import Block, CpuStep, Precomputed
from sparse_decode.cuda.gather import OPERATORS
from sparse_decode.cuda.sums import add_token
from sparse_decode.inputs import Inputs
from sparse_decode.intervals import Memo, Numbers, Seen, causal, intervals_of, seen_on_device
from sparse_decode.modes import in_graph, prompting, readable
from sparse_decode.select import AttendingSelector, HashSelector, Rows, Selector
from sparse_decode.sums import FOLD, Coefficients, Sums, means_of_rows

ROWS_AT_ONCE = 64
"""Rows of a sequence that are processed together; each block's remainder starts from sums over all tokens before it."""


class SparseLayer:
    """One sparse layer of one attachment.

    Attributes:
        start: rows from this position of the batch on are sparse, its padding included; None: the rows of decode steps
            are, calls of one row with a non-empty cache.
        own: the selector, if it computes attention itself.
        tally: numbers of tokens selected and visible. shared: those that all layers of this budget have in common.
        hashes: the selector, if it only applies a `hashtrain.Hasher`. encoder: hashes the layer's keys.
        remainder: coefficients of the remainder; None: none is added.
        reach: the longest context that the hasher was made for; a longer one is warned of, once.
        number: by which compiled graphs refer to this layer; placeholder: see `attend_step`.
    """

    def __init__(
        self, layer: int, selector: Selector, budget: LayerBudget, start: int | None = None,
        remainder: Tensor | None = None, memo: Memo | None = None, shared: Tally | None = None,
        device: torch.device | None = None,
    ):  # fmt: skip
        self.layer: int = layer
        self.selector: Selector = selector
        self.budget: LayerBudget = budget
        self.start: int | None = start
        self.own: AttendingSelector | None = selector if isinstance(selector, AttendingSelector) else None
        self._sink, self._recent = (0, 0) if self.own else (budget.sink, budget.recent)
        self._memo, self._numbers = memo or Memo(), Numbers()
        self.remainder: Coefficients | None = None if remainder is None else Coefficients(remainder)
        self.tally: Tally = Tally(device)
        self.shared: Tally = shared or Tally()
        self.reach: int = sys.maxsize
        self.number: int = register(self)
        self.placeholder: Tensor = torch.zeros(1, dtype=torch.float32, device=device)
        self._cpu = CpuStep(layer, selector, self._sink, self._recent)
        self.hashes: HashSelector | None = selector if isinstance(selector, HashSelector) and selector.is_ours else None
        self.encoder: Encoder = Encoder(selector, layer)

    def counts(self) -> tuple[int, int]:
        """Return the tokens selected and visible so far, summed over sparse rows and query heads."""
        (selected, visible), (more, seen) = self.tally.totals(), self.shared.totals()
        return selected + more, visible + seen

    def warn_beyond(self, n: int) -> None:
        """Warn of a context of `n` tokens, of which only sizes tell: a static cache counts as long as it has room."""
        if not torch.compiler.is_compiling():
            reach, self.reach = self.reach, sys.maxsize
            warnings.warn(beyond(n, reach), stacklevel=3)

    def first_sparse(self, rows: int, n: int) -> int:
        """Return the first of `rows` rows that are sparse in a call that ends at token `n`; `rows` for none."""
        if self.start is not None:
            return max(0, min(rows, self.start + rows - n))
        step = rows == 1 < n and (torch.compiler.is_compiling() or not prompting.get())
        return 0 if step else rows

    def count_dense(self, q: Tensor, interval: Tensor | None, n: int) -> None:
        """Count rows of q [B, Hq, Q, D] that were dense because of `dense_below`, as `step` has their intervals."""
        interval = causal(len(q), q.shape[2], n, q.device) if interval is None else interval.expand(len(q), -1, -1)
        seen = int((interval[..., 1] - interval[..., 0]).sum()) * q.shape[1]
        self.tally.add(seen, seen)

    def step(self, x: Inputs, interval: Tensor | None, held: Any) -> Tensor:
        """Attend in all rows of a call.

        Args: interval: int64 [B, Q, 2] as `intervals_of` returns it; held: the cache layer of k, v, or an `Uncached`.
        """
        rows, n = x.q.shape[2], x.k.shape[2]
        if rows == 1:
            if not readable(x.q):
                return self._on_device(x, interval, held)
            if interval is None and self.own is None:
                return self._plain(x, held, n)
            return self._on_cpu(x, causal(len(x.q), 1, n, x.q.device) if interval is None else interval, held)
        interval = causal(len(x.q), rows, n, x.q.device) if interval is None else interval.expand(len(x.q), -1, -1)
        pieces = list[Tensor]()
        for first in range(0, rows, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, rows)
            end = n - rows + last
            block = x._replace(q=x.q[:, :, first:last], k=x.k[:, :, :end], v=x.v[:, :, :end])
            given = block, interval[:, first:last], held
            pieces.append(self._on_cpu(*given) if readable(x.q) else self._on_device(*given))
        return torch.cat(pieces, 1)

    # ---- On the CPU --------------------------------------------------------------------------------------------------

    def _plain(self, x: Inputs, held: Any, n: int) -> Tensor:
        """Attend in one row of each sequence that sees all n tokens: `_on_cpu` in few calls of Python.

        Each takes microseconds once the other layers of the model have evicted the CPU's caches.
        """
        batch, heads, _, _ = x.q.shape
        reads = self.budget.count_heads(n)
        mean, tail = sum(reads) // len(reads), 0 if min(reads) >= n else max(0, n - self._recent)
        spans = np.array(((0, tail, n),) * batch, np.int64)
        remainder, place = None, (x.q.device, x.scaling)
        if self.remainder is not None:
            sums, remainder = held.sums, self.remainder.placed.get(place) or self.remainder.on(*place)
            known = sums.keys is not None and sums.starts is None and sums.keys.shape[0] == batch
            if not known or not sums.length < n < sums.length + FOLD:  # or they are brought up to date first or then
                return self._on_cpu(x, causal(batch, 1, n, x.q.device), held)
        found = self._cpu.run(x, Block(spans, np.array((reads,), np.int64), n, max(reads), mean), held, remainder)
        if found is None:
            return self._on_cpu(x, causal(batch, 1, n, x.q.device), held)
        self.tally.add(batch * heads * sum(reads) // len(reads), batch * heads * n)
        return found[0]

    def _on_cpu(self, x: Inputs, interval: Tensor, held: Any) -> Tensor:
        """Attend in a block of rows."""
        q, block = x.q, self._block(x.q, interval)
        starts = interval.expand(len(q), -1, -1)[:, -1, 0] if block.spans[:, 0].any() else None
        if self.own is not None:
            return self._by_itself(x, interval, block, held)
        remainder = sums = None
        if self.remainder is not None:
            remainder = self.remainder.placed.get((q.device, x.scaling)) or self.remainder.on(q.device, x.scaling)
            sums = self._sums_of(x, block, starts, held)
        found = self._cpu.run(x, block, held, remainder)
        if found is None:
            indices = self.selector.select(self._rows(x, interval, block, held))
            means = None
            if remainder is not None and q.shape[2] > 1:
                first = int(block.spans[0, 2]) - 1
                before = cast(Sums, sums).advance(x.k, x.v, starts, first, q.device)
                means = means_of_rows(before, q, remainder[1], x.k, x.v, starts, first, first + q.shape[2])
            found = self._cpu.run(x, block, held, remainder, Precomputed(indices, means))
        out, used = cast("tuple[Tensor, NDArray[np.int64]]", found)
        if sums is not None and block.end >= sums.length + FOLD:
            sums.advance(x.k, x.v, starts, block.end, q.device)
        self._count(block, used.reshape(len(block.spans), -1), q.shape[1])
        return out

    def _block(self, q: Tensor, interval: Tensor) -> Block:
        """Return the block of rows q [B, Hq, Q, D] with intervals [B or 1, Q, 2]."""
        seen = interval.expand(len(q), -1, -1).reshape(-1, 2).tolist()
        spans, counts = [], []
        for start, end in seen:
            size = end - start
            reads = self.budget.count_heads(size)
            spans.append((start, start if min(reads) >= size else max(start, end - self._recent), end))
            counts.append(reads)
        made = np.array(counts, np.int64).reshape(-1, len(self.budget.by_head or (1.0,)))
        end = max((end for _, end in seen), default=0)
        return Block(np.array(spans, np.int64).reshape(-1, 3), made, end, int(made.max(initial=0)), int(made.mean()))

    def _sums_of(self, x: Inputs, block: Block, starts: Tensor | None, held: Any) -> Sums:
        """Return sums that cover all tokens before the rows of a block but the last few."""
        sums, rows, spans = cast(Sums, held.sums), x.q.shape[2], block.spans
        if rows == 1 and len(spans) == 1:
            n = block.end
        else:
            begins, ends = (spans[:, i].reshape(len(x.q), rows) for i in (0, 2))
            n, others = int(ends[0, 0]), (begins != begins[:, -1:]) & (begins < ends)  # rows of padding see nothing
            if others.any() or (ends != n + np.arange(rows)).any():
                raise ValueError(
                    "the remainder needs a causal mask, optionally with padding, got one that hides other tokens; "
                    "attach with remainder=False"
                )
        if rows == 1 and not sums.covers(n, len(x.q), starts, x.q.device):
            sums.advance(x.k, x.v, starts, n - 1, x.q.device)
        return sums

    def _rows(self, x: Inputs, interval: Tensor, block: Block, held: Any) -> Rows:
        """Return the input of the selector for a block of rows; those that read all they see select nothing."""
        (batch, _, rows, _), spans = x.q.shape, block.spans
        reads = np.where((spans[:, 1] <= spans[:, 0])[:, None], 0, block.reads - self._sink - self._recent)
        counts = torch.from_numpy(np.maximum(reads, 0)).unflatten(0, (batch, rows)).transpose(1, 2)  # [B, H or 1, Q]
        return self._offered(x, block.end, interval, counts, held)

    def _offered(self, x: Inputs, end: int, interval: Tensor | None, counts: Tensor, held: Any) -> Rows:
        """Return the input of the selector; end: of the tokens that rows see; counts: [B, H or 1, Q]."""
        codes, own = self._codes(x.k, held), counts[:, 0] if counts.shape[1] == 1 else counts
        codes = None if codes is None else codes[:, :, :end]
        seen = x.k[:, :, :end], codes, interval, own
        return Rows(self.layer, x.q, *seen, x.scaling, x.softcap, x.sinks, self._sink, self._recent)

    def _codes(self, k: Tensor, held: Any) -> Tensor | None:
        """Return the codes of the cached keys k [B, Hkv, N, D]: from the cache, or hashed now if there is none."""
        if not self.selector.needs_codes:
            return None
        codes: Tensor = held.codes
        if codes.shape[2] < k.shape[2]:
            raise ValueError(
                f"the cache must carry a code for each of its {k.shape[2]} keys, got {codes.shape[2]}; change its keys "
                "only through its methods"
            )
        return codes

    def _by_itself(self, x: Inputs, interval: Tensor, block: Block, held: Any) -> Tensor:
        """Attend by a selector that does so itself."""
        (batch, hq, rows, _), own = x.q.shape, cast(AttendingSelector, self.own)
        counts = torch.from_numpy(block.reads).expand(batch * rows, -1)[:, 0].view(batch, 1, rows).to(x.q.device)
        given = self._offered(x, block.end, interval, counts, held)
        indices = own.select(given)
        found = (indices >= 0).sum((1, 3)).reshape(-1, 1).cpu().numpy()
        self._count(block, found, hq, indices.shape[1])
        return own.attend(given, x.v[:, :, : block.end], indices)

    def _count(self, block: Block, used: NDArray[np.int64], heads: int, sets: int | None = None) -> None:
        """Add to the tally: used: tokens that each row and set has read, [R, sets], or their sum over `sets`."""
        visible = int((block.spans[:, 2] - block.spans[:, 0]).sum())
        self.tally.add(int(used.sum()) * (heads // (sets or max(1, used.shape[1]))), visible * heads)

    # ---- On a device -------------------------------------------------------------------------------------------------

    def _on_device(self, x: Inputs, interval: Tensor | None, held: Any) -> Tensor:
        """Attend in a block of rows, without waiting for the device if it is one row a sequence."""
        q, k, v, scaling, softcap, sinks = x
        (batch, hq, rows, _), n = q.shape, k.shape[2]
        if self.own is not None:
            interval = causal(batch, rows, n, q.device) if interval is None else interval.expand(batch, -1, -1)
            return self._by_itself(x, interval, self._block(q, interval.cpu()), held)
        seen = None if interval is None and rows == 1 else self._seen(interval, x)
        indices, rest = self._select(x, seen, held), cast("tuple[Tensor | None, ...]", (None,) * 4)
        if self.remainder is not None:
            coefficients, slopes = self.remainder.on(q.device, scaling)
            rest = coefficients, *self._means(x, slopes, seen, held), None if seen is None else seen.visible
        if seen is None:
            reads = self.budget.count_heads(n)
            self.tally.add(batch * hq * sum(reads) // len(reads), batch * hq * n)
            ends = self._sink, self._recent, None
        elif rows == 1:
            ends = 0, 0, seen.always[:, 0]
        else:  # the kernel reads such tokens once for all rows of a sequence
            always = seen.always[:, None].expand(-1, indices.shape[1], -1, -1)
            indices, ends = torch.cat([always, indices], -1), (0, 0, None)
        return OPERATORS.gather(q, k, v, indices, scaling, softcap, sinks, *rest, *ends, None)

    def _select(self, x: Inputs, seen: Seen | None, held: Any) -> Tensor:
        """Select tokens besides those that are always read: int64 [B, H, Q, K], -1 in unused slots."""
        q, n, always = x.q, x.k.shape[2], self._sink + self._recent
        width = max(0, self.budget.most(n) - always)
        known = [max(0, each - always) for each in self.budget.count_heads(n)]
        counts = seen.counts if seen is not None else self._numbers.of(known, q) if len(known) > 1 else None
        if not isinstance(self.selector, HashSelector):
            counts = self._numbers.of(known, q) if counts is None else counts
            found = self.selector.select(self._offered(x, n, None if seen is None else seen.interval, counts, held))
            first, last = (0, n) if seen is None else (seen.starts[..., None], seen.ends[..., None])
            return found.masked_fill((found < first + self._sink) | (found >= last - self._recent), -1)
        codes, planes, weights = self._encoded(x, held)
        bounds = (None, None) if seen is None else (seen.ends, seen.starts)
        rows = max(known) if seen is None else width, counts, *bounds, n, 0, self._sink, self._recent
        return SEARCH.search(planes, codes[:, :, None, :n], weights, False, None, *rows)[1]

    def _encoded(self, x: Inputs, held: Any) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Hash the queries, and the new keys if they are not yet; return codes, planes and the planes' weights."""
        q, k, n, selector = x.q, x.k, x.k.shape[2], cast(HashSelector, self.selector)
        if q.shape[2] == 1 and not torch.compiler.is_compiling():
            room, missing = held.room_for_code()
            if missing is not None and self.hashes is not None:
                found = self.hashes.encode_step(self.layer, k[:, :, n - 1 :], room[:, :, n - 1 : n], q)
                if found is not None:
                    missing.length += 1
                    return room, *found
        return cast(Tensor, self._codes(k, held)), *selector.encode_queries(self.layer, q)

    def _means(self, x: Inputs, slopes: Tensor, seen: Seen | None, held: Any) -> tuple[Tensor, Tensor]:
        """Return mean keys [B, Hkv, Q, D] and values [B, Hq, Q, Dv] of the remainder, and update the sums."""
        (q, k, v), n, rows, sums = x[:3], x.k.shape[2], x.q.shape[2], cast(Sums, held.sums)
        starts = None if seen is None else seen.interval[:, -1, 0]
        if rows > 1:
            before = sums.advance(k, v, starts, n - rows, q.device)
            return means_of_rows(before, q, slopes, k, v, starts, n - rows, n)
        if sums.summed is None:  # else they were brought here by the prompt, and the device knows how far they are
            few = sums.length < n <= sums.length + FOLD and sums.ready and sums.is_for(len(k), q.device)
            if not few:
                sums.advance(k, v, starts, n - 1, q.device)
        mean_keys, rest = add_token(q[:, :, 0], slopes, k, v, sums, None if seen is None else seen.interval[:, 0])
        return mean_keys[:, :, None], rest[:, :, None]

    def _seen(self, interval: Tensor | None, x: Inputs) -> Seen:
        """Return what rows see, and count it; once in a step for all layers of a budget."""
        (batch, hq, rows, _), n, device = x.q.shape, x.k.shape[2], x.q.device
        own = causal(batch, rows, n, device) if interval is None else interval

        def find() -> tuple[Seen, Tensor]:
            return seen_on_device(own.expand(batch, -1, -1).contiguous(), self.budget)

        if interval is None or torch.compiler.is_compiling():
            seen, totals = find()
            self.tally.add_step(totals, hq // seen.counts.shape[1])
            return seen

        def once() -> Seen:
            seen, totals = find()
            self.shared.add_step(totals, hq // seen.counts.shape[1])
            return seen

        # What was computed outside of a capture, or in another one, is not computed again when this one is replayed.
        capture = lane(device) if in_graph(device) else ()
        return self._memo.of(interval, self.layer, (self.budget, batch, hq, n, device, capture), once)


@torch.library.custom_op("sparse_decode::attend_step", mutates_args=("sums",))
def attend_step(
    q: Tensor, k: Tensor, v: Tensor, codes: Tensor | None, mask: Tensor | None, length: Tensor | None,
    sinks: Tensor | None, sums: list[Tensor], layer: int, scaling: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Run a step of a compiled graph, opaque to the compiler, of the layer registered as `layer`: [B, Q, Hq, Dv].

    Updates `sums`: those of a static cache, if there are any, then a placeholder: inductor rejects an empty list.
    """
    own, n = registered[layer], k.shape[2] if length is None else int(length)
    x = Inputs(q, k[:, :, :n], v[:, :, :n], scaling, softcap, sinks)
    if codes is None and own.selector.needs_codes:
        codes = own.encoder(x.k)
    state = Sums.from_tensors(sums[:-1]) if len(sums) > 1 else None
    return own.step(x, intervals_of(mask, q.shape[2], n), Uncached(None if codes is None else codes[:, :, :n], state))


attend_step.register_fake(lambda q, k, v, *_: q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]))
