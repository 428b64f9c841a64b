"""Where keys, values and codes lie in an engine's pages. No engine is imported."""

from typing import Any

import torch
from torch import Tensor


def pages_of(cache: Tensor, words: int) -> Any:
    """View a layer's cache [M, Hkv, S, 2 D] as `sparse_decode.pages.Pages`, with codes of `words` words in the tails.

    A token's key is followed by its value; heads and tokens may be in either order.

    Raises: ValueError if keys and values do not fill the beginning of a page, or codes do not fit behind them.
    """
    from sparse_decode.pages import Pages

    (count, heads, size, width), item = cache.shape, cache.element_size()
    others, dim = heads * size * width, width // 2
    reach = 1 + sum((n - 1) * step for n, step in zip(cache.shape[1:], cache.stride()[1:], strict=True))
    room, page = 4 * heads * size * words, cache.stride(0) * item
    if reach != others or page < others * item + room or page % 16 or others * item % 16:
        raise ValueError(
            f"a page must have room for codes after its keys and values, {others * item + room} bytes in multiples of "
            f"16, got {page} bytes with strides {cache.stride()}"
        )
    whole = cache.as_strided((count, others + room // item), (cache.stride(0), 1)).view(torch.int32)
    codes = whole[:, others * item // 4 :].unflatten(1, (heads, size, words))
    return Pages(cache[..., :dim], cache[..., dim:], codes)
