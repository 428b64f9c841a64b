"""The sums behind the remainder: exact whatever is added, dropped and reordered, and read alike on every backend."""

import pytest
import torch
from hashtrain.evaluation.remainder import linear_values
from sparse_decode.cuda.sums import launch_sums
from sparse_decode.sums import FOLD, Moments, Sums, means_of_rows
from sparse_decode_simulated import device, inside

STARTS = torch.tensor([0, 7, 20])


@pytest.fixture
def cache():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 2, 40, 8, generator=draw).add(0.5).unbind(0)


def queries(k, first, last):
    """Queries of two heads for each KV head, and their slopes."""
    draw = torch.Generator().manual_seed(first)
    return torch.randn(len(k), 4, last - first, 8, generator=draw), torch.rand(4, generator=draw)


def check(sums, k, v, starts, first, last):
    """The means of rows are those of their definition (eq. 16), over each row's own and all earlier tokens."""
    q, slopes = queries(k, first, last)
    before = sums.advance(k, v, starts, first, k.device)
    keys, values = means_of_rows(before, q, slopes, k, v, starts, first, last)
    for b, start in enumerate([0] * len(k) if starts is None else starts.tolist()):
        for r in range(max(first, start), last):
            own_k, own_v = (x[b : b + 1, :, start : r + 1] for x in (k, v))
            torch.testing.assert_close(keys[b, :, r - first], own_k[0].mean(1), atol=1e-5, rtol=1e-5)
            at = torch.tensor([r - start])
            expected = torch.add(*linear_values(q[b : b + 1, :, r - first, None], own_k, own_v, at, slopes)).flatten(
                1, 2
            )
            torch.testing.assert_close(values[b, :, r - first], expected[0, :, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("starts", [None, STARTS])
def test_the_means_are_those_of_their_definition(cache, starts):
    sums = Sums()
    for first, last in ((0, 10), (10, 25), (25, 26), (38, 40)):
        check(sums, *cache, starts, first, last)


@pytest.mark.parametrize("length", [0, 5, 29, 30])
def test_tokens_that_are_dropped_are_forgotten(cache, length):
    k, v = cache
    sums = Sums()
    sums.advance(k, v, STARTS, 30, k.device)
    sums.drop(k, v, length)
    others = [torch.cat([x[:, :, :length], x[:, :, length:] + 1], 2) for x in (k, v)]
    check(sums, *others, STARTS, 31, 33)


def test_rows_may_be_reordered_and_another_batch_begins_anew(cache):
    k, v = cache
    sums, order = Sums(), torch.tensor([2, 0, 0])
    sums.advance(k, v, STARTS, 30, k.device)
    sums.map_batch(lambda x: x.index_select(0, order))
    check(sums, k[order], v[order], STARTS[order], 30, 32)
    check(sums, k[order], v[order], None, 32, 34)
    check(sums, k[:2], v[:2], None, 34, 36)


def test_only_new_tokens_are_read_and_padding_may_hold_anything(cache):
    k, v = cache
    sums, again = Sums(), Sums()
    expected = (sums.advance(k, v, STARTS, 30, k.device), sums.advance(k, v, STARTS, 36, k.device))[1]
    hidden = (torch.arange(40) < STARTS[:, None])[:, None, :, None]
    again.advance(*(x.masked_fill(hidden, torch.nan) for x in (k, v)), STARTS, 30, k.device)
    poisoned = (x.index_fill(2, torch.arange(30), torch.nan) for x in (k, v))
    for found, wanted in zip(again.advance(*poisoned, STARTS, 36, k.device), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_thousand_tokens_do_not_drift():
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, 1100, 16, generator=draw).add(3) for _ in range(2))
    sums = Sums()
    for n in range(100, 1100, FOLD):
        found = sums.advance(k, v, None, n, k.device)
    for mine, exact in zip(found, Moments.of(k, v, None, 0, sums.length, k.device), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-3)


SIZES = [(64, 64), (128, 128), (80, 48), (32, 256), (192, 128), (256, 256), (16, 16)]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("dim", "value_dim"), SIZES)
@pytest.mark.parametrize(("group", "tokens", "new", "order"), [(1, 1, 1, 0), (3, 50, FOLD, 1), (16, 7, 5, 5)])
@pytest.mark.parametrize("way", ["plain", "padded", "static"])
def test_a_step_on_cuda_equals_the_cpus(dim, value_dim, group, tokens, new, order, way):
    """Under the simulator, against the exact means, whose covariance a step reads rounded; folded sums are exact."""
    if way != "plain" and (dim, value_dim) not in SIZES[:3]:
        return
    draw, n = torch.Generator().manual_seed(tokens), tokens + new
    shapes = (2, 2 * group, 1, dim), (2, 2, n, dim), (2, 2, n, value_dim)
    q, k, v = (torch.randn(shape, generator=draw).add(0.5).bfloat16() for shape in shapes)
    starts = None if way == "plain" else torch.tensor([0, min(3, tokens)])
    slopes = torch.rand(2 * group, generator=draw)
    sums = Sums.static(k, v) if way == "static" else Sums()
    sums.advance(k, v, starts, tokens, k.device)
    exact = means_of_rows(Moments.of(k, v, starts, 0, n - 1, k.device), q, slopes, k, v, starts, n - 1, n)
    flat = means_of_rows(Moments.of(k, v, starts, 0, n - 1, k.device), q, 0 * slopes, k, v, starts, n - 1, n)
    interval = None if starts is None else torch.stack([starts, torch.full((2,), n)], -1)
    state = [inside(x) for x in sums.tensors]
    given = state if way == "static" else [*state, starts, None]
    keys, rest = launch_sums(
        inside(q[:, :, 0]), slopes, inside(k), inside(v), *given, tokens, interval, run=device(order)
    )
    torch.testing.assert_close(keys, exact[0][:, :, 0], rtol=1e-5, atol=2e-5)
    scale = (exact[1] - flat[1]).abs().max() * 0.02 + 1e-4
    assert (rest - exact[1][:, :, 0]).abs().max() <= scale
    if new == FOLD:
        whole = Moments.of(k, v, starts, 0, n, k.device)
        for mine, other in zip(state[:3], whole[1:], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-4)
        if way == "static":
            assert (state[-1] == n).all()
    else:
        assert all(torch.equal(mine, held) for mine, held in zip(state, sums.tensors, strict=True))


def test_neither_the_order_of_threads_nor_the_place_of_queries_changes_anything_and_unaligned_rows_are_refused():
    """At addresses that are no multiples of 16, too."""
    x = {"q": torch.randn(2, 4, 64), "k": torch.randn(2, 2, 20, 64), "v": torch.randn(2, 2, 20, 48)}
    x = {name: y.bfloat16() for name, y in x.items()}
    sums = Sums()
    sums.advance(x["k"], x["v"], None, 20 - FOLD, torch.device("cpu"))

    def run(order):
        state = [y.clone() for y in sums.tensors]
        given = x["q"], torch.ones(4), x["k"], x["v"], *state, None, None, 20 - FOLD, None
        return [*launch_sums(*given, run=device(order)), *state]

    def moved(x):
        return torch.empty(x.numel() + 1, dtype=torch.bfloat16)[1:].view(x.shape).copy_(x)

    expected, x["q"] = run(0), moved(x["q"])
    for order in (1, 5, 9):
        assert all(torch.equal(a, b) for a, b in zip(run(order), expected, strict=True))
    for which, name in (("k", "keys"), ("v", "values")):
        aligned, x[which] = x[which], moved(x[which])
        with pytest.raises(ValueError, match=rf"rows of {name} on CUDA must be aligned to 16 bytes.*call \.clone\(\)"):
            run(0)
        x[which] = aligned
