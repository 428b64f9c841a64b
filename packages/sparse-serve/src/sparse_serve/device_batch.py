"""The decode rows of an engine step on a GPU, and the layout of its pages. No engine is imported."""

from typing import Any

import torch
from sparse_decode.budget import LayerBudget
from torch import Tensor


class DeviceBatch:
    """The rows of a step: first those that decode one token each, then prompts.

    Attributes:
        decodes: number of rows that decode; their tokens are the first of the step.
        prompts: the engine's metadata of the rows after them; None if there are none.
    """

    def __init__(
        self, blocks: Tensor, lengths: Tensor, decodes: int, longest: int, size: int, budget: LayerBudget, prompts: Any
    ) -> None:
        """Args:
            blocks, lengths: page tables int32 [R, T] and visible tokens [R] of all rows, on the device. If a CUDA graph
                is captured, it reads them again at each replay.
            longest: upper bound of the lengths of rows that decode, of all replays, too.
            size: tokens per page.
        """  # fmt: skip
        self.decodes: int = decodes
        self.prompts: Any = prompts
        self._given = blocks[:decodes], lengths[:decodes], longest, size, budget
        self._steps: dict[Any, Any] = {}

    def step(self) -> Any:
        """Return the `sparse_decode.cuda.pages.DeviceStep` of the rows that decode, made once for all layers.

        A capture makes its own: it must contain the computation from lengths and tables, and its memory.
        """
        from hashcore.cuda import launch
        from sparse_decode.cuda.pages import DeviceStep

        blocks, lengths, longest, size, budget = self._given
        lane = launch.lane(blocks.device)
        if lane not in self._steps:
            room = rounded(longest, size, blocks.shape[1] * size)
            self._steps[lane] = DeviceStep.of(blocks[:, : -(-room // size)], lengths, budget, size, room)
        return self._steps[lane]


def rounded(longest: int, size: int, most: int) -> int:
    """Round a number of tokens up by at most an eighth, or to a whole page, so that few sizes occur; at most `most`.

    The kernels' launches are described once for each size.
    """
    unit = max(size, 1 << max(0, longest.bit_length() - 4))
    return min(-(-longest // unit) * unit, most)


def device_pages(cache: Tensor, words: int) -> Any:
    """View a layer's cache [M, Hkv, S, 2 D] as `paged.Pages`: keys, values, and codes in the page's tail.

    A token's key is followed by its value; heads and tokens may be in either order.

    Raises: ValueError if keys and values do not fill the beginning of a page, or codes of `words` words do not fit
        behind them.
    """
    from sparse_decode.pages import Pages

    count, heads, size, width = cache.shape
    others, item = heads * size * width, cache.element_size()
    reach = 1 + sum((n - 1) * step for n, step in zip(cache.shape[1:], cache.stride()[1:], strict=True))
    room, page = 4 * heads * size * words, cache.stride(0) * item
    if reach != others or page < others * item + room or page % 16 or others * item % 16:
        raise ValueError(
            f"a page must have room for codes after its keys and values, {others * item + room} bytes in multiples of "
            f"16, got {page} bytes with strides {cache.stride()}"
        )
    whole = cache.as_strided((count, others + room // item), (cache.stride(0), 1)).view(torch.int32)
    codes = whole[:, others * item // 4 :].unflatten(1, (heads, size, words))
    return Pages(cache[..., : width // 2], cache[..., width // 2 :], codes)
