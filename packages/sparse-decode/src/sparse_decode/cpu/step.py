"""Rows of one layer on the CPU: prepares the one call of the step kernel."""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from hashcore.arguments import address
from hashcore.cpu import threads
from hashtrain.layers import LayerHasher
from numpy.typing import NDArray
from torch import Tensor

from sparse_decode.cpu import encode, step_kernels
from sparse_decode.cpu.step_kernels import FORM
from sparse_decode.inputs import KINDS, LIKE, Inputs, reach
from sparse_decode.select import HashSelector

Fitted = tuple[Tensor, Tensor] | None
"""What `Coefficients.on` returns; None without a remainder."""
_NO_SUMS = 0, 0, 0, 0, 0
_NOTHING_GIVEN: tuple[tuple[int, ...], list[Any]] = (0,) * 9, []


class Block(NamedTuple):
    """What some rows see and read.

    Attributes:
        spans, reads: those of `step_kernels.tasks`, in the order of rows [B, Q].
        end: where the last row's tokens end. most, mean: of `reads`.
    """

    spans: NDArray[np.int64]
    reads: NDArray[np.int64]
    end: int
    most: int
    mean: int

    @classmethod
    def whole(cls, rows: int, n: int) -> "Block":
        """Return a block of rows that see n tokens, of which none is read by itself."""
        return cls(np.array([[0, n, n]] * rows, np.int64).reshape(-1, 3), np.zeros((1, 1), np.int64), n, 0, 0)


class Precomputed(NamedTuple):
    """What the kernel need not compute.

    Attributes:
        indices: a selection, int64 [B, H, Q, K]; tokens of it that are invisible or always read are skipped.
        means: of the remainder, float32 [B, Hkv, Q, D] and [B, Hq, Q, Dv]; None: from the sums, for one row a sequence.
        table: page tables, int64 [B, T], if keys and values are pages [M, Hkv, S, D].
    """

    indices: Tensor
    means: tuple[Tensor, Tensor] | None = None
    table: NDArray[np.int64] | None = None


class _Form(NamedTuple):
    """The kernel's arguments that calls share if they differ only in tensor contents and the number of tokens."""

    key: tuple[Any, ...]  # shapes, dtypes and strides of the calls
    values: NDArray[np.int64]  # in the order of FORM
    bits: int  # of all planes of a code, to compare with one key
    remainder: Fitted


class CpuStep:
    """Runs rows of one layer on the CPU.

    Args: selector: hashes in the kernel if it is a `HashSelector` of `planes` or `transform`; others give indices.
        sink, recent: of the budget.
    """

    def __init__(self, layer: int, selector: object, sink: int = 0, recent: int = 0):
        self._layer = layer
        self._ends, self._always = (sink, recent), sink + recent
        ours = type(selector) is HashSelector and selector.is_ours and not selector.per_query_head
        self._own = selector if ours else None
        self._forms: dict[bool, _Form] = {}

    def run(
        self, x: Inputs, block: Block, held: Any = None, remainder: Fitted = None, given: Precomputed | None = None
    ) -> tuple[Tensor, NDArray[np.int64]] | None:
        """Attend: q [B, Hq, Q, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] -> [B, Q, Hq, Dv] and the tokens read [R, sets].

        Args: held: the cache layer with codes and sums. remainder: coefficients of the remainder, if there is one.
        Returns: None if the kernel cannot select here: another hasher, several rows a sequence, or a search that
            more threads should share. Select, and call again with the selection.
        Raises: ValueError if a given index is out of range.
        """
        q, k, v, scaling, softcap, sinks = x
        (batch, hq, rows, dim), dim_v = q.shape, v.shape[3]
        codes, pending = (None, None) if given is not None or self._own is None else held.room_for_code()
        if given is None and (codes is None or rows > 1):
            return None
        sets = k.shape[1] if given is None else given.indices.shape[1]
        form = self._formed((q, k, v) if codes is None else (q, k, v, codes), remainder, sets)
        if form is None:
            return None
        tasks, group = batch * rows * sets, hq // sets
        out = torch.empty((batch, rows, hq, dim_v), dtype=torch.float32, device=q.device)
        own_sinks = None if sinks is None else sinks.detach().float().contiguous()
        at_codes = 0 if codes is None else codes.data_ptr()
        where = rows, q.data_ptr(), k.data_ptr(), v.data_ptr(), at_codes, out.data_ptr()
        more = (0 if own_sinks is None else own_sinks.data_ptr(), int(pending is not None))
        sums = _NO_SUMS
        if remainder is not None and (given is None or given.means is None):
            own = held.sums
            sums = own.length, own.keys.data_ptr(), own.values.data_ptr(), own.levels.data_ptr(), own.scales.data_ptr()
        given_at, keep = _NOTHING_GIVEN if given is None else _place(given, k, v)
        call, read = np.array((*where, *more, *sums, *given_at), np.int64), group * (dim + dim_v)
        if given is None:
            work = tasks * (block.end * form.bits // 32 + block.mean * read)
            most, steps, grown = max(self._always, block.most), 2 * tasks, tasks
        else:
            most = int((block.spans[:, 2] - block.spans[:, 1]).max(initial=0)) + given.indices.shape[3] + self._always
            work, steps, grown = 2 * tasks * most * read, tasks, 0
        workers = 1
        if work >= 2 * min(threads.GRAIN, threads.TEAM_GRAIN):  # enough for two
            available = min(threads.most(), torch.get_num_threads())
            if given is None and available > tasks and work > (tasks + 1) * threads.GRAIN:
                return None  # a search of its own is divided, and so uses all threads
            workers = threads.count(work, min(available, tasks))
        used = np.zeros(tasks, np.int64)
        shared = block.spans, block.reads, np.empty((grown, most), np.int64), np.zeros(tasks, np.int64), used
        factors = np.float32(scaling), np.float32(softcap or 0)
        wrong = threads.run(
            step_kernels.tasks, steps, workers, (form.values, call, LIKE[k.element_size()], *factors, *shared)
        )
        del keep
        if given is not None and any(wrong):
            raise ValueError(f"indices must be below N = {block.end}, got {int(given.indices.max())}")
        if pending is not None:
            pending.length += 1
        return out if q.dtype == torch.float32 else out.to(q.dtype), used

    def _formed(self, given: tuple[Tensor, ...], remainder: Fitted, sets: int) -> _Form | None:
        """Return the shared arguments of such calls; None for other hashers."""
        q, k, v, *codes = given
        own = bool(codes)
        known = self._forms.get(own)
        key = (
            *(sets, q.dtype, k.dtype, v.dtype, remainder is None, q.shape, k.shape[:2], v.shape[:2]),
            *(k.shape[3], v.shape[3], q.stride(), k.stride(), v.stride()),
            *(item for x in codes for item in (x.shape[:2], x.shape[3], x.stride())),
        )
        if known is not None and known.key == key:
            mine = known.remainder
            if remainder is mine or (remainder and mine and remainder[0] is mine[0]):
                return known
        made = self._made(key, given, remainder, sets)
        if made is not None:
            self._forms[own] = made
        return made

    def _made(self, key: tuple[Any, ...], given: tuple[Tensor, ...], remainder: Fitted, sets: int) -> _Form | None:
        q, k, v, *codes = given
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"q, k and v must have one type, got {q.dtype}, {k.dtype}, {v.dtype}; use a new cache")
        names = "Q", "K", "V", "CODE"
        found = {f"{name}_{step}": x.stride(i) for name, x in zip(names, given, strict=False)
                 for i, step in enumerate(("BATCH", "HEAD", "TOKEN"))}  # fmt: skip
        sizes = sets, q.shape[1] // sets, sets // k.shape[1], k.shape[3], v.shape[3], KINDS[q.dtype]
        found |= dict(zip(("SETS", "GROUP", "SHARE", "DIM", "DIM_V", "KIND"), sizes, strict=True))
        found |= dict(zip(("SINK", "RECENT", "REMAINDER"), (*self._ends, int(remainder is not None)), strict=True))
        if codes:
            views = self._views(*given)
            if views is None:
                return None
            found |= _of_hasher(views) | step_kernels.addresses()
        if remainder is not None:
            found |= {name: x.data_ptr() for name, x in zip(("COEFFICIENTS", "SLOPES"), remainder, strict=True)}
        bits = found.get("BITS", 0) * found.get("PLANES", 0)
        return _Form(key, np.array([found.get(name, 0) for name in FORM], np.int64), bits, remainder)

    def _views(self, q: Tensor, k: Tensor, v: Tensor, codes: Tensor) -> encode.Views | None:
        """Return the hasher's arrays; None if the kernel does not support them for these tensors."""
        own = cast(HashSelector, self._own).placed(self._layer, q.device)
        views = own.views
        if views is None or not encode.supports(q) or not _agree(own.layer, q, k, v, codes):
            return None
        return views if all(x.flags.c_contiguous for x in views.key + views.query) else None


def _place(given: Precomputed, k: Tensor, v: Tensor) -> tuple[tuple[int, ...], list[Any]]:
    """Return the arguments of a call for what is given, in order, and the owners of the addresses."""
    indices = given.indices.contiguous()
    means = [] if given.means is None else [x.contiguous() for x in given.means]
    at = [x.data_ptr() for x in means] or [0, 0]
    chosen = indices.data_ptr() if indices.numel() else 1, indices.shape[3]
    if given.table is None:
        return (*at, *chosen, 0, 0, 0, 0, 0), [indices, means]
    table = np.ascontiguousarray(given.table)
    pages = address(table), table.shape[1], k.shape[2], reach(k), reach(v)
    return (*at, *chosen, *pages), [indices, means, table]


def _agree(own: LayerHasher, q: Tensor, k: Tensor, v: Tensor, codes: Tensor) -> bool:
    """Whether the tensors of a call have one dtype, the sizes of the hasher, and contiguous components."""
    heads = q.shape[1] == own.hkv * own.group and k.shape[1] == v.shape[1] == codes.shape[1] == own.hkv
    sizes = q.shape[3] == k.shape[3] == own.d and 32 * codes.shape[3] == own.bits
    alike = q.dtype == k.dtype == v.dtype and q.dtype in KINDS and len(q) == len(k) == len(v) == len(codes)
    return heads and sizes and alike and all(x.stride(3) == 1 for x in (q, k, v, codes))


def _of_hasher(own: encode.Views) -> dict[str, int]:
    """Return the sizes and addresses of a hasher by their names in FORM."""
    (r, w1, *_), (_, of_keys, *_) = own.query, own.key
    spread = own.digits[0].size > 0
    found = {
        "BITS": own.digits[0].shape[1] if spread else r.shape[2],
        "PLANES": own.planes,
        "COORDINATES": r.shape[2],
        "SPREAD": int(spread),
        "QUERY_HIDDEN": w1.shape[2],
        "KEY_HIDDEN": of_keys.shape[2],
    }
    names = [f"{which}_{name.upper()}" for which in ("QUERY", "KEY") for name in encode.NAMES]
    found |= {name: address(x) for name, x in zip(names, own.query + own.key, strict=True)}
    return found | {name: address(x) for name, x in zip(("COORDINATE", "POWER", "LIMIT"), own.digits, strict=True)}
