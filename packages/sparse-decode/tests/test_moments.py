"""The CUDA kernel of the remainder's sums, run on the CPU under the host simulator, against the CPU's own."""

import pytest
import torch
from sparse_decode.unselected import moments, remainder, static_moments
from sparse_decode.unselected.remainder import RunningMoments
from sparse_decode.unselected.sums import FOLD, Moments, Rounded
from sparse_decode_simulated import device, inside

LAST = 2  # mean keys and the values of eq. 16 come first, then the sums


def assert_alike(ours, theirs):
    """Results and sums are alike, levels but for a step: a sum in another order may round to the next."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        if mine.dtype == torch.int8:
            assert (mine.int() - other.int()).abs().max() <= 1
        else:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("size", [(1, 3), (5, 64)])
def test_a_rounded_spread_is_within_half_a_level(size):
    spread = torch.randn(2, 2, *size) * torch.logspace(-6, 6, size[0])[:, None]
    spread[0, 0, 0] = 0
    levels, scales = Rounded.of(spread)
    assert levels.dtype == torch.int8
    assert ((levels * scales[..., None] - spread).abs() <= 0.5001 * scales[..., None]).all()
    assert Rounded.of(spread * torch.nan).scales.isnan().all(), "what is lost stays lost"


def steps(dim, value_dim, dtype, batch, group, tokens, new):
    generator = torch.Generator().manual_seed(tokens)
    n = tokens + new
    shapes = (batch, 2 * group, 1, dim), (batch, 2, n, dim), (batch, 2, n, value_dim)
    q, k, v = (torch.randn(shape, generator=generator).add(0.5).to(dtype) for shape in shapes)
    return q, torch.rand(2 * group, generator=generator), k, v, Moments.of(k, v, None, 0, tokens, k.device)


@pytest.mark.parametrize(
    ("dim", "value_dim", "dtype"),
    [
        *((64, 64, torch.bfloat16), (128, 128, torch.float16), (80, 48, torch.bfloat16), (32, 256, torch.float16)),
        *((192, 128, torch.bfloat16), (256, 256, torch.float16), (16, 16, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize(
    ("batch", "group", "tokens", "new", "order"), [(1, 1, 1, 1, 0), (2, 3, 50, FOLD, 1), (1, 16, 7, 5, 5)]
)
def test_a_step_equals_the_cpus(dim, value_dim, dtype, batch, group, tokens, new, order):
    q, slopes, k, v, sums = steps(dim, value_dim, dtype, batch, group, tokens, new)
    given = [inside(x) for x in (*sums[1:], *Rounded.of(sums.spread))]
    ours = remainder.add_token(inside(q[:, :, 0]), slopes, inside(k), inside(v), *given, tokens, run=device(order))
    theirs = moments.on_cpu(q[:, :, 0], slopes, k, v, *given, tokens, None, None, None)
    assert len(ours) == (LAST + 6 if new == FOLD else LAST)
    assert_alike(ours, theirs)


def moved(x):
    """The same numbers at an address that is no multiple of 16."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return room.copy_(x)


@pytest.mark.parametrize("which", ["q", "k", "v", "rows"])
def test_numbers_may_lie_anywhere(which):
    q, slopes, k, v, sums = steps(64, 48, torch.bfloat16, 2, 3, 50, FOLD)
    given, at = (*sums[1:], *Rounded.of(sums.spread), 50), "qkv".find(which)
    x = [q[:, :, 0].contiguous(), k, v]
    if which == "rows":
        x[1] = torch.cat([k, k[..., :1]], -1)[..., :-1]
    else:
        x[at] = moved(x[at])
    ours = remainder.add_token(x[0], slopes, *x[1:], *given, run=device(5))
    assert_alike(ours, moments.on_cpu(q[:, :, 0], slopes, k, v, *given, None, None, None))


@pytest.mark.parametrize("new", [1, 7, FOLD])
def test_a_step_is_the_last_row_of_rows(new):
    """But for the rounding of the spread, which here is as large as the other tokens' share."""
    q, slopes, k, v, sums = steps(64, 48, torch.float32, 2, 2, 400, new)
    means, rest, *_ = moments.on_cpu(
        q[:, :, 0], slopes, k, v, *sums[1:], *Rounded.of(sums.spread), 400, None, None, None
    )
    n = k.shape[2]
    keys, values, _ = RunningMoments().rows(q, slopes, k, v, None, n - 1, n)
    torch.testing.assert_close(means, keys[:, :, 0], rtol=1e-5, atol=1e-5)
    flat = RunningMoments().rows(q, 0 * slopes, k, v, None, n - 1, n)[1]
    error = (rest - values[:, :, 0]).norm() / (values - flat).norm()
    assert 0 < error < 0.01


def test_the_order_of_threads_changes_nothing():
    q, k = torch.randn(1, 4, 64).bfloat16(), torch.randn(1, 2, 20, 64).bfloat16()
    sums = torch.randn(1, 2, 64).double(), torch.randn(1, 2, 64).double(), torch.randn(1, 2, 64, 64)
    given = *sums, *Rounded.of(sums[2]), 20 - FOLD
    first, *others = (remainder.add_token(q, torch.ones(4), k, k, *given, run=device(order)) for order in (0, 1, 5, 9))
    assert len(first) == LAST + 6
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def padded(new, tokens=70, room=70):
    """A step of three rows: without padding, with some, and one that does not see its own token."""
    draw = torch.Generator().manual_seed(1)
    shapes = (3, 4, 64), (3, 2, room, 64), (3, 2, room, 64)
    q, k, v = (torch.randn(shape, generator=draw).bfloat16() for shape in shapes)
    shown = torch.zeros(3, room, dtype=torch.bool)
    shown[0, :tokens] = shown[1, 9:tokens] = shown[2, 3 : tokens - 1] = True
    shown[2, 20] = False
    k[1, :, :9] = v[1, :, :9] = torch.nan  # what is hidden is not even read
    k[2, :, tokens - 1] = v[2, :, tokens - 1] = torch.nan
    sums = Moments.of(k, v, shown, 0, tokens - new, k.device)
    return q, torch.rand(4, generator=draw), k, v, sums, shown.sum(-1, keepdim=True), shown


@pytest.mark.parametrize(("order", "new"), [(0, FOLD), (5, 3), (9, FOLD)])
def test_rows_with_padding_sum_what_they_see(order, new):
    q, slopes, k, v, sums, visible, shown = padded(new)
    given = *sums[1:], *Rounded.of(sums.spread), 70 - new, visible
    ours = remainder.add_token(
        q, slopes, inside(k), inside(v), *given, inside(shown), shown[:, : 70 - new], run=device(order)
    )
    theirs = remainder.OPERATORS.add_token(q, slopes, k, v, *given, shown, shown[:, : 70 - new])
    assert_alike(ours, theirs)
    assert not any(x.isnan().any() for x in ours)
    if new == FOLD:
        whole = Moments.of(k, v, shown, 0, 70, k.device)
        assert_alike(ours[LAST:], [*whole, *Rounded.of(whole.spread)])


@pytest.mark.parametrize("new", [3, FOLD])
@pytest.mark.parametrize("place", [(0, 0), (1, 30), (2, 52)])
@pytest.mark.parametrize("room", [70, 96])  # rows of a mask that are no whole pieces of 16 bytes, and such that are
def test_a_mask_that_changed_behind_the_sums_gives_no_number(place, new, room):
    q, slopes, k, v, sums, visible, shown = padded(new, room=room)
    summed = shown.clone()
    summed[place] = ~summed[place]
    given = *sums[1:], *Rounded.of(sums.spread), 70 - new, visible, shown[:, :70], summed[:, : 70 - new]
    means, rest, *later = remainder.add_token(q, slopes, k[:, :, :70], v[:, :, :70], *given, run=device(0))
    assert means.isnan().any((1, 2)).tolist() == rest.isnan().any((1, 2)).tolist() == [i == place[0] for i in range(3)]
    if later:
        assert torch.equal(later[1].isnan(), means.isnan()), "the steps that follow do not know what was summed either"


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("place", [None, 0, 15, 16, 17_000, 39_999])
def test_every_token_of_a_long_mask_is_compared(place, offset):
    """Also without a mask on one side: nothing was hidden. Offset: of the mask in memory."""
    q, k = torch.zeros(1, 2, 16).bfloat16(), torch.zeros(1, 1, 40_001, 16).bfloat16()
    mask = torch.ones(40_001 + offset, dtype=torch.bool)[None, offset:]
    if place is not None:
        mask[0, place] = False
    sums = torch.zeros(1, 1, 16).double(), torch.zeros(1, 1, 16).double(), torch.zeros(1, 1, 16, 16)
    before, all_seen = mask[:, :-1], torch.ones_like(mask)
    for now, then in ((mask, None), (None, before), (all_seen, before), (mask, before)):
        given = *sums, *Rounded.of(sums[2]), 40_000, None, now, then
        means, rest = remainder.add_token(q, torch.ones(2), k, k, *given, run=device(0))
        changed = place is not None and (now is not mask or then is not before)
        assert means.isnan().all() == rest.isnan().all() == changed


@pytest.mark.parametrize("order", [0, 5])
@pytest.mark.parametrize("new", [1, FOLD])
def test_a_static_cache_is_summed_in_place(order, new):
    q, slopes, k, v, before, visible, shown = padded(new, room=90)
    now, first = torch.tensor(70), 70 - new

    def sums():
        seen = shown.clone()
        seen[:, first:] = False
        return [*(x.clone() for x in (*before, *Rounded.of(before.spread))), seen, torch.full((3, 2), first)]

    ours, theirs = sums(), sums()
    means = static_moments.add_in_place(q, slopes, k, v, *ours, visible, shown, now, run=device(order))
    cpus = remainder.OPERATORS.add_in_place(q, slopes, k, v, *theirs, visible, shown, now)
    assert_alike([*ours, *means], [*theirs, *cpus])
    folded = new == FOLD
    assert ours[-1].tolist() == [[70 if folded else first] * 2] * 3
    whole = Moments.of(k, v, shown, 0, 70 if folded else first, k.device)
    assert_alike(ours[:4], whole)
    if folded:
        assert torch.equal(ours[-2][:, :70], shown[:, :70])
        twice = static_moments.add_in_place(q, slopes, k, v, *ours, visible, shown, now, run=device(order))
        assert twice[1].isnan().all(), "a token that is summed already"
        with pytest.raises(ValueError, match="changed for earlier tokens"):
            remainder.OPERATORS.add_in_place(q, slopes, k, v, *theirs, visible, shown, now)


def test_a_thousand_steps_do_not_drift():
    """The sums stay exact: only what a step reads is rounded."""
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, 1100, 16, generator=draw).add(3) for _ in range(2))
    q, running, worst = torch.randn(1, 4, 1, 16, generator=draw), RunningMoments(), 0.0
    running.rows(q, torch.ones(4), k[:, :, :100], v[:, :, :100], None, 99, 100)
    for n in range(101, 1101):
        found = running.step(q, torch.ones(4), k[:, :, :n], v[:, :, :n])
        assert found is not None
        if n % 100 < 3:
            expected = RunningMoments().rows(q, torch.ones(4), k[:, :, :n], v[:, :, :n], None, n - 1, n)
            worst = max(worst, float((found[1] - expected[1]).abs().max()))
            torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    whole = Moments.of(k, v, None, 0, running.length, k.device)
    assert running.length > 1080
    for mine, exact in zip(running._sums, whole, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-3)
    assert 0 < worst < 0.01
