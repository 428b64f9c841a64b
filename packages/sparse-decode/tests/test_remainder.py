"""The remainder in attention: running means, and what it adds to a selection (docs/algorithm.md, eq. 15 and 16)."""

import copy

import pytest
import torch
from hashtrain.evaluation.remainder import Evidence, add_remainder, linear_values, log_weight
from sparse_decode import Budget, attach, attend
from sparse_decode.attach import attach_rows
from sparse_decode.layer import plan
from sparse_decode.unselected.remainder import RunningMoments
from sparse_decode.unselected.sums import FOLD
from sparse_decode_doubles import Calibrated, SignHasher, generate, prompts, tiny_model

ROUNDED = 1e-2
"""How far a step's values may be off because it reads 8 bits of each number of the covariance."""


@pytest.fixture
def cache():
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 3, 2, 40, 8, generator=generator)
    seen = torch.ones(3, 40, dtype=torch.bool)
    seen[1, :7], seen[2, :20] = False, False
    return k, v, seen


def plain_means(k, v, seen, first, last):
    """The definition: for each row, the mean over the tokens that it sees."""
    found = []
    for x in (k, v):
        rows = [
            [x[b, :, : r + 1][:, seen[b, : r + 1]].mean(1) if seen[b, : r + 1].any() else x.new_zeros(x.shape[1], 8)
             for r in range(first, last)]
            for b in range(len(x))
        ]  # fmt: skip
        found.append(torch.stack([torch.stack(row, 1) for row in rows]))
    return found


def queries(k, first, last):
    """Queries of two heads for each KV head, and their slopes."""
    draw = torch.Generator().manual_seed(first)
    return torch.randn(len(k), 4, last - first, 8, generator=draw), torch.rand(4, generator=draw)


def check(moments, k, v, seen, first, last):
    q, slopes = queries(k, first, last)
    keys, values, counts = moments.rows(q, slopes, k, v, seen, first, last)
    mean_keys, mean_values = plain_means(k, v, seen, first, last)
    torch.testing.assert_close(keys, mean_keys, atol=1e-5, rtol=1e-5)
    assert torch.equal(counts, seen[:, :last].cumsum(1)[:, first:])
    for b in range(len(k)):
        mine = [x[b : b + 1, :, seen[b, : x.shape[2]].nonzero()[:, 0]] for x in (k[:, :, :last], v[:, :, :last])]
        rows = (counts[b] > 0).nonzero()[:, 0]
        expected = linear_values(q[b : b + 1, :, rows], *mine, counts[b, rows] - 1, slopes)
        torch.testing.assert_close(values[b : b + 1, :, rows], expected, atol=1e-4, rtol=1e-4)
        blind = (counts[b] == 0).nonzero()[:, 0]
        assert torch.equal(values[b, ::2, blind], mean_values[b][:, blind])


def test_means_step_by_step_are_those_of_their_definition(cache):
    moments = RunningMoments()
    for first, last in ((0, 10), (10, 25), (25, 26), (26, 27), (38, 40)):
        check(moments, *cache, first, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_step_gives_the_means_of_its_row(cache, dtype):
    k, v = (x.to(dtype) for x in cache[:2])
    moments, by_rows = RunningMoments(), RunningMoments()
    assert moments.step(*queries(k, 29, 30), k[:, :, :30], v[:, :, :30]) is None  # nothing is summed yet
    for n in range(30, 35):
        q, part = queries(k, n - 1, n), (k[:, :, :n], v[:, :, :n])
        expected = by_rows.rows(*q, *part, None, n - 1, n)[:2]
        keys, values = moments.step(*q, *part) if n > 30 else moments.rows(*q, *part, None, n - 1, n)[:2]
        torch.testing.assert_close(keys, expected[0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(values, expected[1], atol=ROUNDED if n > 30 else 1e-5, rtol=1e-5)
    assert moments.length == 30
    few = RunningMoments()
    few.rows(*q, k, v, None, 8, 9)
    assert few.step(*q, k[:, :, : 10 + FOLD], v[:, :, : 10 + FOLD]) is None  # too many tokens are new
    assert few.step(*q, k[:, :, : 9 + FOLD], v[:, :, : 9 + FOLD]) is not None
    assert few.length == 9 + FOLD
    padded = RunningMoments()
    padded.rows(*q, *cache, 29, 30)
    assert padded.step(*q, k[:, :, :31], v[:, :, :31]) is None  # its sums leave some tokens out


def test_a_step_reads_only_what_is_new(cache):
    k, v, seen = cache
    moments = RunningMoments()
    moments.rows(*queries(k, 29, 30), k, v, seen, 29, 30)
    q = queries(k, 30, 31)
    expected = moments.rows(*q, k, v, seen, 30, 31)
    again = RunningMoments()
    again.rows(*q, k, v, seen, 29, 30)
    poisoned = [x.index_fill(2, torch.arange(30), torch.nan) for x in (k, v)]
    for found, wanted in zip(again.rows(*q, *poisoned, seen, 30, 31), expected, strict=True):
        assert torch.equal(found, wanted)


def test_padding_may_hold_anything(cache):
    k, v, seen = cache
    q = queries(k, 20, 40)
    poisoned = (x.masked_fill(~seen[:, None, :, None], torch.nan) for x in (k, v))
    for found, wanted in zip(
        RunningMoments().rows(*q, *poisoned, seen, 20, 40), RunningMoments().rows(*q, k, v, seen, 20, 40), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("length", [0, 5, 29, 30])
def test_means_after_dropping_tokens(cache, length):
    k, v, seen = cache
    moments = RunningMoments()
    moments.rows(*queries(k, 29, 30), k, v, seen, 29, 30)
    moments.drop(k, v, length)
    other = [x.clone() for x in (k, v)]
    for x in other:
        x[:, :, length:] += 1  # other tokens come in their place
    check(moments, *other, seen, 31, 33)


def test_means_of_reordered_rows(cache):
    k, v, seen = cache
    moments = RunningMoments()
    moments.rows(*queries(k, 29, 30), k, v, seen, 29, 30)
    order = torch.tensor([2, 0, 0])
    moments.map_batch(lambda x: x.index_select(0, order))
    check(moments, k[order], v[order], seen[order], 30, 32)


def test_another_mask_or_batch_is_noticed(cache):
    k, v, seen = cache
    moments = RunningMoments()
    moments.rows(*queries(k, 29, 30), k, v, seen, 29, 30)
    check(moments, k, v, ~seen | (torch.arange(40) > 20), 30, 32)
    check(moments, k[:2], v[:2], seen[:2], 32, 34)


@pytest.mark.parametrize("budget", [0.1, 0.5])
def test_attention_with_the_remainder_is_that_of_its_equations(budget, monkeypatch):
    model, hasher = tiny_model(), Calibrated()
    ids, mask = prompts()
    calls = []

    def record(*given, **how):
        calls.append((*given, attend(*given, **how)))
        return calls[-1][-1]

    monkeypatch.setattr(plan, "attend", record)
    with attach_rows(model, hasher, Budget(budget), sparse_rows=0, dense_layers=3) as attachment:
        assert attachment.remainder
        model(ids, attention_mask=mask, use_cache=False)
    ((q, k, v, indices, scaling, whole),) = calls
    out, stats = attend(q, k, v, indices, scaling, lse=True)
    for b, row in ((0, 39), (1, 39), (1, 20), (2, 39)):
        tokens = torch.arange(40)[mask[b].bool() & (torch.arange(40) <= row)]
        for head in range(4):
            keys, values = k[b, head // 2, tokens], v[b, head // 2, tokens]
            chosen = indices[b, head // 2, row]
            chosen = chosen[chosen >= 0]
            logits = k[b, head // 2, chosen] @ q[b, head, row] * scaling
            torch.testing.assert_close(stats[0, b, row, head], logits.mean(), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(stats[1, b, row, head], logits.logsumexp(0), atol=1e-4, rtol=1e-4)
            mean_key = keys.mean(0) @ q[b, head, row] * scaling
            sizes = torch.tensor(len(tokens)), torch.tensor(len(chosen))
            e = Evidence(logits.mean(), logits.logsumexp(0), mean_key, *sizes)
            weight = log_weight(hasher.coefficients[head, :-1], e)
            slope = hasher.coefficients[head, -1:] * scaling
            last = torch.tensor([len(tokens) - 1])
            value = linear_values(*(y[None, None] for y in (q[b, head, row, None], keys, values)), last, slope)[0, 0, 0]
            expected = add_remainder(out[b, row, head], e.lse, value, weight)
            torch.testing.assert_close(whole[b, row, head], expected, atol=1e-4, rtol=1e-4)


def test_the_remainder_changes_attention_and_can_be_left_out():
    model = tiny_model()
    ids, _ = prompts((40,))
    outs = []
    for hasher, wanted in ((Calibrated(), True), (Calibrated(), False), (SignHasher(), True)):
        with attach_rows(model, hasher, Budget(0.1), sparse_rows=0, remainder=wanted) as attachment:
            outs.append(model(ids).logits)
            assert attachment.remainder == (wanted and isinstance(hasher, Calibrated))
    assert torch.equal(outs[1], outs[2])
    assert not torch.allclose(outs[0], outs[1], atol=1e-3)


def test_a_whole_budget_is_dense():
    model = tiny_model()
    ids, mask = prompts()
    dense = generate(model, ids, mask)
    with attach(model, Calibrated(), Budget(1.0)):
        assert torch.equal(generate(model, ids, mask), dense)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_cached_steps_equal_one_pass_over_the_text(options):
    """Beams reorder the cache, prompt lookup crops it; a forward pass over the final text keeps no state at all."""
    model = tiny_model()
    ids, _ = prompts((33,))
    with attach_rows(model, Calibrated(), Budget(0.2), sparse_rows=33):
        text = generate(model, ids, new_tokens=12, **options)
    with attach_rows(model, Calibrated(), Budget(0.2), sparse_rows=33):
        logits = model(text, use_cache=False).logits
    if not options.get("num_beams"):
        assert torch.equal(logits[:, 32:-1].argmax(-1), text[:, 33:])
    with attach(model, Calibrated(), Budget(0.2)):
        first = model(text[:, :33], use_cache=True)
        steps = [model(text[:, [i]], past_key_values=first.past_key_values).logits for i in range(33, text.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), logits[:, 33:], atol=2e-4, rtol=2e-4)


def test_a_padded_row_equals_the_row_alone():
    model = tiny_model()
    ids, mask = prompts((40, 27))
    with attach(model, Calibrated(), Budget(0.2)):
        together = generate(model, ids, mask)
        alone = generate(model, ids[1:, 13:])
    assert torch.equal(together[1, 40:], alone[0, 27:])


def test_keys_and_values_on_the_host_give_the_same():
    model = tiny_model()
    ids, mask = prompts((40, 27))
    longer, found = torch.cat([mask, mask.new_ones(2, 1)], 1), {}
    for kv, remainder in (("device", True), ("host", True), ("host", False)):
        with attach(model, Calibrated(), Budget(0.2), kv=kv, remainder=remainder):
            past = model(ids, attention_mask=mask, use_cache=True).past_key_values
            step = model(ids[:, :1], attention_mask=longer, past_key_values=past)
            found[kv, remainder] = step.logits
    torch.testing.assert_close(found["host", True], found["device", True], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found["host", True], found["host", False], atol=1e-3), "the remainder changes something"


def test_a_copied_cache_goes_its_own_way():
    model = tiny_model()
    ids, _ = prompts((30,))
    with attach(model, Calibrated(), Budget(0.2)):
        past = model(ids[:, :20], use_cache=True).past_key_values
        model(ids[:, 20:21], past_key_values=past)
        twin = copy.deepcopy(past)
        one = model(ids[:, 21:22], past_key_values=past).logits
        model(ids[:, 25:26], past_key_values=twin)
        again = model(ids[:, 22:23], past_key_values=past).logits
    with attach_rows(model, Calibrated(), Budget(0.2), sparse_rows=20):
        expected = model(ids[:, :23], use_cache=False).logits
    torch.testing.assert_close(torch.cat([one, again], 1), expected[:, 21:], atol=2e-4, rtol=2e-4)


def test_a_mask_that_is_not_causal_is_refused():
    model = tiny_model()
    ids, _ = prompts((20,))
    mask = torch.tril(torch.ones(20, 20, dtype=torch.bool))[None, None].clone()
    mask[..., 10:, :5] = False  # two packed texts
    mask[..., 19, :] = True
    with (
        attach_rows(model, Calibrated(), Budget(0.2), sparse_rows=0),
        pytest.raises(ValueError, match="needs a causal mask"),
    ):
        model(ids, attention_mask=mask, use_cache=False)
