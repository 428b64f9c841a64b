"""The decode rows of an engine step on a GPU. No engine is imported."""

from typing import Any

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
