"""Writing codes to their slots in pages on CUDA: prepares the launch of kernels/place.cu."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from hashcore.cuda import launch
from hashcore.cuda.kernels import make_launch
from torch import Tensor

from sparse_decode.attention.gather import KERNELS, Run

THREADS = 256


class Target(ctypes.Structure):
    """Target of kernels/place.cu, field by field."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("page", "head", "token", "slots")),
        ("size", ctypes.c_int32),
    )


def place_codes(codes: Tensor, slots: Tensor, pages: Tensor, run: Run | None = None) -> None:
    """Write codes int32 [T, H, W] to pages int32 [M, H, S, W] at slots int64 [T]: page times S plus place in the page.

    Tokens whose slot is out of range, such as -1, are skipped: the host does not see the slots.

    Raises: ValueError on other shapes or dtypes, or if the words of a code in a page are not contiguous.
    """
    (tokens, heads, words), (count, _, size, _) = codes.shape, pages.shape
    if pages.shape != (count, heads, size, words) or slots.shape != (tokens,) or slots.dtype != torch.int64:
        raise ValueError(
            f"codes [T, H, W] need slots int64 [T] and pages [M, H, S, W], got {tuple(codes.shape)}, {slots.dtype} "
            f"{tuple(slots.shape)} and {tuple(pages.shape)}"
        )
    if codes.dtype != torch.int32 or pages.dtype != torch.int32 or (pages.stride(3) != 1 and words > 1):
        raise ValueError(
            f"codes and pages must be int32, with contiguous words in the pages, got {codes.dtype} and {pages.dtype} "
            f"with strides {pages.stride()}"
        )
    total = tokens * heads * words
    if not total:
        return
    codes, slots = codes.contiguous(), slots.contiguous()
    target = Target(pages.data_ptr(), *pages.stride()[:3], count * size, size)
    arguments = ctypes.c_void_p(codes.data_ptr()), ctypes.c_void_p(slots.data_ptr()), target
    sizes = ctypes.c_int32(heads), ctypes.c_int32(words), ctypes.c_int64(total)
    one = make_launch("place.cu", "place_codes", (-(-total // THREADS), 1), THREADS, (*arguments, *sizes))
    (launch.run if run is None else run)([one], pages.device, KERNELS)


LIBRARY = torch.library.Library("sparse_decode", "FRAGMENT")
LIBRARY.define("place_codes(Tensor codes, Tensor slots, Tensor(a!) pages) -> ()")
LIBRARY.impl("place_codes", place_codes, "CUDA")
torch.library.register_fake("sparse_decode::place_codes", lambda *_: None, lib=LIBRARY)
OPERATORS: Any = torch.ops.sparse_decode
