"""The CUDA kernel of the remainder's sums, run on the CPU under the host simulator, against the CPU's own."""

import pytest
import torch
from sparse_decode import moments
from sparse_decode.remainder import RunningMoments
from sparse_decode_simulated import device, inside


@pytest.mark.parametrize(
    ("dim", "value_dim", "dtype"),
    [(64, 64, torch.bfloat16), (128, 128, torch.float16), (80, 48, torch.bfloat16), (32, 256, torch.float16)],
)
@pytest.mark.parametrize(("batch", "group", "tokens", "order"), [(1, 1, 1, 0), (2, 3, 50, 1), (1, 16, 7, 5)])
def test_a_step_equals_the_cpus(dim, value_dim, dtype, batch, group, tokens, order):
    generator = torch.Generator().manual_seed(tokens)
    shapes = (batch, 2 * group, 1, dim), (batch, 2, tokens + 1, dim), (batch, 2, tokens + 1, value_dim)
    q, k, v = (torch.randn(shape, generator=generator).add(0.5).to(dtype) for shape in shapes)
    slopes = torch.rand(2 * group, generator=generator)
    running = RunningMoments()
    running.rows(q, slopes, k[:, :, :tokens], v[:, :, :tokens], None, tokens - 1, tokens)
    sums = [inside(x) for x in running._sums[1:]]
    last = k[:, :, -1], v[:, :, -1]  # by strides, in a longer cache
    ours = moments.add_token(inside(q[:, :, 0]), slopes, *last, *sums, tokens + 1, run=device(order))
    means, rest = running.step(q, slopes, k, v)
    for mine, theirs in zip(ours, (*running._sums[1:], means[:, :, 0], rest[:, :, 0]), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_the_order_of_threads_changes_nothing():
    q, k = torch.randn(1, 4, 64).bfloat16(), torch.randn(1, 2, 64).bfloat16()
    sums = torch.randn(1, 2, 64).double(), torch.randn(1, 2, 64).double(), torch.randn(1, 2, 64, 64)
    first, *others = (moments.add_token(q, torch.ones(4), k, k, *sums, 9, run=device(order)) for order in (0, 1, 5, 9))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
