"""Attention over a selection on every backend against the reference in float64, and what it must not read.

The backends: the CPU's kernel, and those of CUDA under the host simulator, between guard pages. In every comparison
all keys and values that are not selected are NaN.
"""

import re

import numpy as np
import pytest
import torch
from gather_cases import CLOSE, KINDS, expected, in_pages, make, poisoned, rest_of
from hashcore.cpu import threads
from hashcore.cuda import launch
from hashcore.cuda.kept import Table
from hashcore.cuda.source import read_source
from hostsim import check_slack, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_decode import attend, attend_reference
from sparse_decode.cpu.attend_kernels import TILE
from sparse_decode.cuda import gather
from sparse_decode_simulated import device, inside

F32, UNUSED = torch.float32, torch.tensor([-1])
OF_CPU = [*KINDS, (1, 1, F32), (16, 16, F32), (33, 20, torch.bfloat16), (96, 40, torch.float16), (136, 512, F32)]
TOLERANCES = CLOSE | {F32: {"rtol": 1e-5, "atol": 1e-5}}
ORDERS = [0, 1, 7]
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "cuda"])


def on_cuda(q, k, v, indices, scaling=0.1, softcap=None, sinks=None, rest=None, ends=(0, 0), run=None, **how):
    return gather.gather(q, k, v, indices, scaling, softcap, sinks, *(rest or [None] * 4), *ends, run=run, **how)


def both(backend, inputs, order=0, pages=0, always=None, ends=(0, 0), rest=None, **how):
    """Run the kernels and the reference, and compare them; pages: tokens of a page, 0 for none."""
    q, k, v, indices = inputs
    theirs, how = expected(*inputs, rest=rest, ends=ends, always=always, **{"scaling": 0.1, **how}), dict(how)
    k, v = poisoned(k, v, indices, ends, always)
    if backend == "cpu":
        scaling = how.pop("scaling", 0.1)
        ours = attend(q, k, v, indices, scaling, **how)
        torch.testing.assert_close(attend_reference(q, *inputs[1:], scaling, **how), theirs, **TOLERANCES[q.dtype])
    else:
        gather.check(*inputs[:3], indices.shape[1])
        if pages:
            k, v, blocks = in_pages(k, v, pages)
            how["blocks"] = inside(blocks)
        rest, always = None if rest is None else [*map(inside, rest)], None if always is None else inside(always)
        given = (inside(x) if x.numel() else x for x in (q, k, v, indices))
        ours = on_cuda(*given, rest=rest, ends=ends, always=always, run=device(order), **how)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    torch.testing.assert_close(ours, theirs, **TOLERANCES[ours.dtype])
    return ours


SIZES = st.sampled_from([(1, 1, 1), (2, 1, 2), (1, 2, 3)])  # batch, queries, KV heads


@settings(deadline=None, max_examples=60)
@given(
    *(st.sampled_from(OF_CPU), st.integers(1, 16), SIZES, st.integers(1, 200)),
    *(st.sampled_from([0, 1, 3, TILE - 1, TILE, TILE + 1, 64, 3 * TILE, 300]), st.sampled_from([None, 0.5, 30.0])),
    *(st.booleans(), st.booleans(), st.integers(0, 99)),
)
def test_equals_the_reference_on_the_cpu(kind, group, sizes, tokens, width, softcap, sink, per_query_head, seed):
    batch, queries, sets = sizes
    how = {"group": group, "sets": sets, "tokens": tokens, "width": width, "batch": batch, "queries": queries}
    q, k, v, indices = make(kind, **how, seed=seed, unused=UNUSED)
    if per_query_head:
        indices = make(kind, **{**how, "sets": sets * group, "group": 1}, seed=seed + 1, unused=UNUSED)[3]
    sinks = torch.linspace(-4, 4, sets * group) if sink else None
    both("cpu", (q, k, v, indices), scaling=0.3, softcap=softcap, sinks=sinks)


@settings(deadline=None, max_examples=24)
@given(
    *(st.sampled_from(KINDS), st.integers(1, 16), SIZES, st.integers(1, 200)),
    *(st.sampled_from([0, 1, 15, 16, 17, 64, 65, 300]), st.sampled_from([None, 2.0, 30.0]), st.booleans()),
    *(st.sampled_from(["", "ends", "listed"]), st.booleans(), st.sampled_from(ORDERS), st.integers(0, 99)),
)
def test_equals_the_reference_on_cuda(kind, group, sizes, tokens, width, softcap, sink, more, rest, order, seed):
    (batch, queries, sets), ends = sizes, (3, 2) if more == "ends" else (0, 0)
    inputs = make(kind, group, sets, tokens, width, batch, queries, seed, ends)
    how = {"softcap": softcap, "sinks": torch.linspace(-3, 3, sets * group) if sink else None}
    always = torch.tensor([[0, tokens - 1, -1]]).repeat(batch, 1) if more == "listed" else None
    left, pages = rest_of(*inputs[:3], seed) if rest else None, 0 if ends[0] else [0, 16, 32][seed % 3]
    both("cuda", inputs, order, pages, always, ends, left, scaling=kind[0] ** -0.5, **how)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rest", [False, True])
def test_pages_and_the_order_of_threads_change_no_bit(kind, rest):
    inputs = make(kind, group=7, width=150, batch=2)
    how = {"rest": rest_of(*inputs[:3]) if rest else None, "sinks": torch.ones(14)}
    alone = both("cuda", inputs, **how)
    for order, pages in ((7, 16), (1, 0)):
        assert torch.equal(both("cuda", inputs, order, pages, **how), alone)
    if rest:
        assert not torch.equal(both("cuda", inputs, sinks=torch.ones(14))[0], alone[0])


def test_calls_of_one_form_do_not_take_what_another_kept():
    """Launches are kept from call to call: of caches that grow, in other memory, with other options."""
    options = [{}, {"scaling": 0.3}, {"softcap": 2.0}, {"sinks": torch.ones(4)}, {"ends": (3, 2)}, {"pages": 16}]
    options += [{"always": torch.tensor([[0, 5]])}, {"rest": True}]
    for seed, tokens in ((0, 90), (1, 90), (2, 91)):
        for how in options:
            inputs = make(tokens=tokens, seed=seed, ends=how.get("ends", (0, 0)))
            both("cuda", inputs, **(how | {"rest": rest_of(*inputs[:3])} if "rest" in how else how))


@BACKENDS
def test_rows_that_select_nothing_are_zero_and_large_logits_do_not_overflow(backend):
    q, k, v, indices = make(queries=3, width=20, unused=UNUSED)
    indices[:, :, 1] = -1
    for sinks in (None, torch.ones(4)):
        assert not both(backend, (q, k, v, indices), sinks=sinks)[:, 1].any()
    assert both(backend, make(width=130, unused=UNUSED), scaling=30.0).isfinite().all()
    run = attend if backend == "cpu" else on_cuda
    assert not run(q, k, v, indices[..., :0], 0.1).any()
    assert run(q[:0], k[:0], v[:0], indices[:0], 0.1).shape == (0, 3, 4, 128)


@BACKENDS
def test_queries_keys_and_values_are_read_where_they_lie(backend):
    for kind in OF_CPU[:6] if backend == "cpu" else KINDS[:1]:
        q, k, v, indices = make(kind, tokens=60, unused=UNUSED)
        room = torch.full((1, 100, 2, kind[0] + kind[1]), torch.nan).to(k.dtype)  # with room, tokens before heads
        room[:, :60] = torch.cat([k, v], 3).transpose(1, 2)
        views = room[:, :60].transpose(1, 2).split([kind[0], kind[1]], 3)
        q = torch.cat([q.new_zeros(1), q.flatten()])[1:].view(q.shape)  # queries at no multiple of 4 bytes
        out = attend(q, *views, indices, 0.1) if backend == "cpu" else on_cuda(q, *views, indices, run=device())
        torch.testing.assert_close(out, expected(q, k, v, indices, 0.1), **TOLERANCES[q.dtype])


# ---- The CPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_where_it_belongs_and_nowhere_else(bad):
    indices = torch.arange(20).expand(1, 1, 2, 20)
    q, k, v, _ = make((16, 16, F32), group=6, sets=1, tokens=40, queries=2)
    clean = attend(q, k, v, indices, 0.3)
    q[:, 0, :, 3] = bad
    found = attend(q, k, v, indices, 0.3)
    assert found[:, :, 0].isnan().all()
    torch.testing.assert_close(found[:, :, 1:], clean[:, :, 1:], atol=1e-5, rtol=1e-4)
    q, k, v, _ = make((16, 16, F32), sets=1, tokens=40)
    for count in (5, 16, 20, 33):  # whatever its place
        for place in range(count):
            wrong = v.clone()
            wrong[0, 0, place, 3] = torch.inf
            found = attend(q, k, wrong, torch.arange(count).expand(1, 1, 1, count), 0.3)
            assert (found[..., 3] == torch.inf).all()
            assert found[..., :3].isfinite().all()
    k[0, 0, 3] = torch.nan
    assert attend(q, k, v, torch.full((1, 1, 1, 1), 3), 0.3).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_sixteen_bit_number_is_read_exactly(dtype):
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).view(1, 1, -1, 1)
    finite = values.isfinite().flatten()
    q = torch.ones(1, 1, len(values.flatten()), 1, dtype=dtype)
    each = torch.arange(q.shape[2]).view(1, 1, -1, 1)
    out = attend(q, torch.zeros_like(values), values, each, 1.0).view(-1)
    assert torch.equal(out[finite], values.view(-1)[finite])
    assert torch.equal(out[~finite].isnan(), values.view(-1)[~finite].isnan())


@pytest.mark.usefixtures("real_threads")
def test_threads_change_nothing(monkeypatch):
    """Many times: where memory lies differs from thread to thread and from call to call, and must not matter."""
    inputs = make((16, 48, F32), 3, 2, 200, 64, batch=2, queries=9, unused=UNUSED)
    options = {"softcap": 0.5, "sinks": torch.linspace(-4, 4, 6)}
    serial = attend(*inputs, 0.3, **options)
    monkeypatch.setattr(threads, "TEAM_GRAIN", 1)
    assert all(torch.equal(attend(*inputs, 0.3, **options), serial) for _ in range(100))


def test_a_backward_pass_is_refused():
    q, *others = make((16, 16, F32), unused=UNUSED)
    with torch.enable_grad():
        out = attend(q.requires_grad_(), *others, 0.3)
        with pytest.raises(RuntimeError, match="no backward"):
            out.sum().backward()


def test_wrong_arguments_are_named():
    q, k, v, indices = make((16, 16, F32), 3, tokens=37, width=9, unused=UNUSED)
    for arguments, message in [
        ((q.double(), k, v, indices), "float32, bfloat16 or float16, got torch.float64"),
        ((q, k.half(), v, indices), "got torch.float32, torch.float16"),
        ((q[:, :5], k, v, indices), "must agree"),
        ((q, k, v[:, :, :5], indices), "must agree"),
        ((q, k, v, indices.int()), "indices must be int64"),
        ((q, k, v, indices[:, :1]), "indices must be int64"),
        ((q, k, v, indices.clamp(min=37)), "indices must be below N = 37, got 37"),
        ((q, k, v.transpose(2, 3).contiguous().transpose(2, 3), indices), "must be contiguous"),
        ((q.to("meta"), k, v, indices), "runs on the CPU"),
    ]:
        with pytest.raises(ValueError, match=message):
            attend(*arguments, 0.3)
    with pytest.raises(ValueError, match="softcap must be above 0 or None, got 0"):
        attend(q, k, v, indices, 0.3, softcap=0.0)
    with pytest.raises(ValueError, match=r"sinks must be one logit per query head, shape \(6,\), got \(2,\)"):
        attend(q, k, v, indices, 0.3, sinks=torch.zeros(2))


# ---- CUDA ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(("sms", "group", "width"), [(1, 2, 333), (3, 2, 333), (40, 2, 333), (200, 2, 16 * 270)])
def test_the_split_changes_nothing_but_rounding(monkeypatch, sms, group, width):
    """The last: more splits than a thread reads at once (8 of 8 threads), and more than there are threads."""
    monkeypatch.setattr(gather, "LEAST_SLOTS", 16)
    monkeypatch.setattr(launch, "sm_count", lambda _: sms)
    monkeypatch.setattr(gather, "_calls", Table())
    assert gather.split(1, 16 * 270, 200) == (16, 270)
    for kind in KINDS[:3:2]:
        sets = 1 if sms > 40 else 2
        both("cuda", make(kind, group, sets=sets, width=width), sinks=torch.ones(4)[: 2 * sets], order=7)


@given(st.integers(1, 500), st.integers(1, 100_000), st.integers(1, 200))
def test_splits_cover_the_slots_once(tasks, width, sms):
    slots, splits = gather.split(tasks, width, sms)
    assert slots % gather.SLOTS == 0
    assert (splits - 1) * slots < width <= splits * slots
    assert splits == 1 or tasks * splits <= gather.BLOCKS_PER_SM * sms


def test_results_lie_within_their_memory(monkeypatch):
    """Everything the kernels write lies between guard pages, and nothing beside it changes."""
    kept, inputs = [], make(width=150, group=3)

    def guarded_like(like):
        kept.append(torch.from_numpy(guarded(np.zeros(like.shape, np.int16), 2)))
        return kept[-1].view(like.dtype)

    def guarded_scratch(words, device):
        kept.append(torch.from_numpy(guarded(np.zeros(words, np.int32))))  # aligned to 16 bytes, as torch's memory is
        return kept[-1]

    on_cuda(*inputs, run=lambda *_: None)  # prepares the form
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", guarded_like)
        patched.setattr(gather, "scratch", guarded_scratch)
        ours = on_cuda(*inputs, run=device())
    assert len(kept) == 2
    for held in kept:
        check_slack(held.numpy())
    torch.testing.assert_close(ours, expected(*inputs, 0.1), **CLOSE[ours.dtype])


def test_both_kernels_start_early_and_wait_before_they_read():
    """Else they would read what is not there yet: the host simulator runs one after the other."""
    launches = []
    on_cuda(*make(), run=lambda given, *_: launches.extend(given))
    assert [(one.kernel, one.programmatic) for one in launches] == [("gather", True), ("combine", True)]
    text = read_source(gather.KERNELS, "gather.cu")
    for one in launches:
        before, after = re.search(rf" {one.kernel}\(const.*?\n}}", text, re.S)[0].split("wait_for_predecessor();")
        assert not re.search(r"__ldg|\b(read|get|put|token_of|place_of)\(", before)
        assert "let_dependents_start();" in after  # only then is the memory that both use free


def test_what_the_kernel_is_not_made_for_is_refused():
    sizes = "keys and values on CUDA must have a multiple of 16 components, at most 256, got"

    def check(q, k, v, indices):
        gather.check(q, k, v, indices.shape[1])

    for options, message in (
        ({"kind": (128, 128, F32)}, "needs bfloat16 or float16, got torch.float32; convert the model"),
        ({"group": 17}, "supports up to 16 query heads per index set, got 17"),
        ({"kind": (72, 64, torch.float16)}, f"{sizes} 72"),
        ({"kind": (64, 272, torch.float16)}, f"{sizes} 272"),
    ):
        with pytest.raises(ValueError, match=message):
            check(*make(**options))
    q, k, v, indices = make()
    wide = torch.zeros(1, 2, 90, 132, dtype=k.dtype)
    with pytest.raises(ValueError, match=r"rows of keys on CUDA must be aligned to 16 bytes.*call \.clone\(\)"):
        check(q, wide[..., :128], v, indices)
    with pytest.raises(ValueError, match="rows of values on CUDA must be aligned to 16 bytes"):
        check(q, k, torch.zeros(1, 2, 90, 136, dtype=k.dtype)[..., 4:132], indices)
    k, v, blocks = in_pages(k, v, 24)
    with pytest.raises(ValueError, match=r"power of two of tokens, below 2\^31 in all, got 6 pages of 24"):
        on_cuda(q, k, v, indices, blocks=blocks)
