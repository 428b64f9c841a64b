"""The remainder's means on CUDA (`sparse_decode.sums`): one launch of kernels/moments.cu, which also adds tokens."""

from collections.abc import Iterator

import torch
from hashcore.cuda import launch
from hashcore.cuda.kernels import make_launch
from hashcore.cuda.source import structure
from torch import Tensor

from sparse_decode.cuda.gather import KERNELS, OPERATORS, Run, check, macros, operator
from sparse_decode.sums import FOLD, Sums

THREADS = 256
STATE = "keys", "values", "spread", "levels", "scales"


def defined(dim: int, value_dim: int, dtype: torch.dtype) -> tuple[tuple[str, str], ...]:
    """Return the macros that moments.cu is compiled with."""
    return (*macros(dim, value_dim, dtype), ("SPARSE_FOLD", str(FOLD)))


TOKEN, BOUNDS, SUMS, RESULTS = (structure(KERNELS, "moments.cu", x) for x in ("Token", "Bounds", "State", "Results"))


def add_token(
    q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, sums: Sums, interval: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the means of the last token's row (eq. 16); every `FOLD` tokens, also add these to the sums.

    Args:
        q: its queries, [B, Hq, D]; slopes: float32 [Hq], times the factor on the logits; k [B, Hkv, N, D] and v
            [B, Hkv, N, Dv], bfloat16 or float16 like q, with contiguous components and rows aligned to 16 bytes.
        sums: cover all tokens but the last few; interval: what rows see, int64 [B, 2]; None: all N tokens.
    Returns: mean keys float32 [B, Hkv, D] and the values of eq. 16, float32 [B, Hq, Dv]. If the sums are not of the
        visible tokens of a row but the last few, both are NaN, and so are sums that are written then: the host could
        only recompute them after waiting for the device.
    """
    if sums.summed is not None:
        return OPERATORS.add_token(q, slopes, k, v, *sums.tensors, 0, interval)
    *state, n = *sums.tensors, k.shape[2]
    found = OPERATORS.add_token(q, slopes, k, v, *state, sums.starts, None, sums.length, interval)
    if n == sums.length + FOLD:
        sums.length = n
    return found


def launch_sums(
    q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, spread: Tensor, levels: Tensor,
    scales: Tensor, starts: Tensor | None, summed: Tensor | None, covered: int, interval: Tensor | None,
    run: Run | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the kernel: the operator `add_token` on CUDA."""
    results, (batch, heads, n, dim), value_dim = empty_means(q, slopes, k, v, keys), k.shape, v.shape[3]
    if not batch:
        return results
    check(q, k, v, heads)
    q, group, device = q.contiguous(), q.shape[1] // heads, q.device
    q = q.clone() if q.data_ptr() % 16 else q
    interval = None if interval is None else interval.contiguous()
    arguments = (
        TOKEN(*_at(k, v), *k.stride()[:3], *v.stride()[:3], *_at(q, slopes), heads, group, n, covered),
        BOUNDS(*_at(interval, starts, summed)),
        SUMS(*_at(keys, values, spread, levels, scales)),
        RESULTS(*_at(*results)),
    )
    macros, grid = defined(dim, value_dim, q.dtype), (batch * heads, 1)
    one = make_launch("moments.cu", "add_token", grid, THREADS, arguments, macros, programmatic=True)
    (launch.run if run is None else run)([one], device, KERNELS)
    return results


def _at(*tensors: Tensor | None) -> Iterator[int | None]:
    """Return the addresses of tensors."""
    return (None if x is None else x.data_ptr() for x in tensors)


def empty_means(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, keys: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    """Return tensors for mean keys [B, Hkv, D] and values [B, Hq, Dv]; also the operator's fake implementation."""
    return (q.new_empty(*keys.shape, dtype=torch.float32), q.new_empty(*q.shape[:2], v.shape[-1], dtype=torch.float32))


_HELD = ", ".join(f"Tensor({mark}!) {name}" for mark, name in zip("abcde", STATE, strict=True))
operator(
    f"add_token(Tensor q, Tensor slopes, Tensor k, Tensor v, {_HELD}, Tensor? starts, Tensor(f!)? summed, "
    "SymInt covered, Tensor? interval) -> (Tensor, Tensor)",
    empty_means,
    cuda=launch_sums,
)
