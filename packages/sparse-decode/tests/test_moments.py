"""The CUDA kernel of the remainder's sums, run on the CPU under the host simulator, against the CPU's own."""

import pytest
import torch
from sparse_decode import moments
from sparse_decode.remainder import Moments, RunningMoments
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
    ours = moments.add_token(inside(q[:, :, 0]), slopes, inside(k), inside(v), *sums, run=device(order))
    means, rest = running.step(q, slopes, k, v)
    for mine, theirs in zip(ours, (*running._sums, means[:, :, 0], rest[:, :, 0]), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_the_order_of_threads_changes_nothing():
    q, k = torch.randn(1, 4, 64).bfloat16(), torch.randn(1, 2, 9, 64).bfloat16()
    sums = torch.randn(1, 2, 64).double(), torch.randn(1, 2, 64).double(), torch.randn(1, 2, 64, 64)
    first, *others = (moments.add_token(q, torch.ones(4), k, k, *sums, run=device(order)) for order in (0, 1, 5, 9))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def padded(tokens=70, room=70):
    """A step of three rows: without padding, with some, and one that does not see its own token."""
    draw = torch.Generator().manual_seed(1)
    shapes = (3, 4, 64), (3, 2, room, 64), (3, 2, room, 64)
    q, k, v = (torch.randn(shape, generator=draw).bfloat16() for shape in shapes)
    shown = torch.zeros(3, room, dtype=torch.bool)
    shown[0, :tokens] = shown[1, 9:tokens] = shown[2, 3 : tokens - 1] = True
    shown[2, 20] = False
    k[1, :, :9] = v[1, :, :9] = torch.nan  # what is hidden is not even read
    before = Moments.of(k, v, shown, 0, tokens - 1, k.device)
    return q, torch.rand(4, generator=draw), k, v, before, shown.sum(-1, keepdim=True), shown


@pytest.mark.parametrize("order", [0, 5, 9])
def test_rows_with_padding_sum_what_they_see(order):
    q, slopes, k, v, before, visible, shown = padded()
    ours = moments.add_token(
        q, slopes, inside(k), inside(v), *before[1:], visible, inside(shown), shown[:, :-1], run=device(order)
    )
    whole = Moments.of(k, v, shown, 0, 70, k.device)
    theirs = moments.OPERATORS.add_token(q, slopes, k, v, *before[1:], visible, shown, shown[:, :-1])
    for mine, cpus, summed in zip(ours, theirs, whole, strict=False):
        torch.testing.assert_close(mine, summed, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(cpus, summed, rtol=1e-5, atol=1e-5)
    for mine, cpus in zip(ours[4:], theirs[4:], strict=True):
        torch.testing.assert_close(mine, cpus, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", [(0, 0), (1, 30), (2, 68)])
def test_a_mask_that_changed_behind_the_sums_gives_no_number(place):
    q, slopes, k, v, before, visible, shown = padded()
    summed = shown.clone()
    summed[place] = ~summed[place]
    _, keys, *_, means, rest = moments.add_token(
        q, slopes, k, v, *before[1:], visible, shown, summed[:, :-1], run=device(0)
    )
    assert torch.equal(keys.isnan(), means.isnan()), "the steps that follow do not know what was summed either"
    assert means.isnan().any((1, 2)).tolist() == rest.isnan().any((1, 2)).tolist() == [i == place[0] for i in range(3)]


@pytest.mark.parametrize("order", [0, 5])
def test_a_static_cache_is_summed_in_place(order):
    q, slopes, k, v, before, visible, shown = padded(70, room=90)
    now = torch.tensor(70)

    def sums():
        seen = shown.clone()
        seen[:, 69:] = False
        return [*(x.clone() for x in before), seen, torch.full((3,), 69)]

    ours, theirs = sums(), sums()
    means = moments.add_in_place(q, slopes, k, v, ours, visible, shown, now, run=device(order))
    cpus = moments.OPERATORS.add_in_place(q, slopes, k, v, *theirs, visible, shown, now)
    for mine, other in zip((*ours, *means), (*theirs, *cpus), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert ours[-1].tolist() == [70] * 3
    torch.testing.assert_close(ours[1], Moments.of(k, v, shown, 0, 70, k.device).keys)
    twice = moments.add_in_place(q, slopes, k, v, ours, visible, shown, now, run=device(order))
    assert twice[1].isnan().any((1, 2)).all(), "a token that is summed already"
    with pytest.raises(ValueError, match="changed for earlier tokens"):
        moments.OPERATORS.add_in_place(q, slopes, k, v, *theirs, visible, shown, now)
