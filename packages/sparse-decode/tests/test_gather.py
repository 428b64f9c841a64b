"""The CUDA kernels of attention over a selection, run on the CPU under the host simulator, against the reference.

In every case all keys and values that are not selected are NaN, and everything lies between guard pages.
"""

import re

import numpy as np
import pytest
import torch
from gather_cases import CLOSE, KINDS, expected, in_pages, make, poisoned, rest_of
from hashcore.cuda.kept import Memory, Table
from hashcore.cuda.source import read_source
from hostsim import SimulationError, Simulator, check_slack, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_decode.cuda import gather
from sparse_decode_simulated import device, inside

ORDERS = [0, 1, 7]


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, **CLOSE[ours.dtype])


def attend(q, k, v, indices, scaling=0.1, softcap=None, sinks=None, rest=None, ends=(0, 0), run=None, **how):
    return gather.gather(q, k, v, indices, scaling, softcap, sinks, *(rest or [None] * 4), *ends, run=run, **how)


def both(inputs, order=0, pages=0, always=None, ends=(0, 0), rest=None, broken=None, **how):
    """Run the kernels and the reference, and compare them; pages: tokens of a page, 0 for none."""
    q, k, v, indices = inputs
    gather.check(*inputs)
    theirs, how = expected(*inputs, rest=rest, ends=ends, always=always, **{"scaling": 0.1, **how}), dict(how)
    k, v = poisoned(k, v, indices, ends, always)
    if pages:
        k, v, blocks = in_pages(k, v, pages)
        how["blocks"] = inside(blocks)
    rest, always = None if rest is None else [*map(inside, rest)], None if always is None else inside(always)
    given = (inside(x) if x.numel() else x for x in (q, k, v, indices))
    ours = attend(*given, rest=rest, ends=ends, always=always, run=device(order, broken), **how)
    assert ours.shape == theirs.shape
    assert_close(ours, theirs)
    return ours


@settings(deadline=None, max_examples=24)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 16),
    st.sampled_from([(1, 1, 1), (2, 1, 2), (1, 2, 3)]),
    st.integers(1, 200),
    st.sampled_from([0, 1, 15, 16, 17, 64, 65, 300]),
    st.sampled_from([None, 2.0, 30.0]),
    st.booleans(),
    st.sampled_from(["", "ends", "listed"]),
    st.sampled_from(["", "rest"]),
    st.sampled_from(ORDERS),
    st.integers(0, 99),
)
def test_equals_the_reference(kind, group, sizes, tokens, width, softcap, sink, more, rest, order, seed):
    (batch, queries, sets), ends = sizes, (3, 2) if more == "ends" else (0, 0)
    inputs = make(kind, group, sets, tokens, width, batch, queries, seed, ends)
    how = {"softcap": softcap, "sinks": torch.linspace(-3, 3, sets * group) if sink else None}
    always = torch.tensor([[0, tokens - 1, -1]]).repeat(batch, 1) if more == "listed" else None
    left = rest_of(*inputs[:3], seed) if rest else None
    both(inputs, order, 0 if ends[0] else [0, 16, 32][seed % 3], always, ends, left, scaling=kind[0] ** -0.5, **how)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rest", [False, True])
def test_equals_the_reference_for_every_type_and_pages_change_no_bit(kind, rest):
    inputs = make(kind, group=7, width=150, batch=2)
    left = rest_of(*inputs[:3]) if rest else None
    alone = both(inputs, rest=left, sinks=torch.ones(14))
    assert torch.equal(both(inputs, 7, 16, rest=left, sinks=torch.ones(14)), alone)
    if rest:
        assert not torch.equal(both(inputs, sinks=torch.ones(14))[0], alone[0])


def test_large_logits_do_not_overflow():
    assert both(make(width=130), scaling=30.0).isfinite().all()


@pytest.mark.parametrize("sink", [False, True])
def test_a_row_that_selects_nothing_is_zero(sink):
    q, k, v, indices = make(queries=3, width=20)
    indices[:, :, 1] = -1
    assert not both((q, k, v, indices), sinks=torch.ones(4) if sink else None)[:, 1].any()


def test_nothing_to_attend_to_launches_nothing():
    q, k, v, indices = make()
    for inputs in ((q, k, v, indices[..., :0]), (q[:0], k[:0], v[:0], indices[:0])):
        out = attend(*inputs, run=lambda *_: pytest.fail("launched"))
        assert torch.equal(out, torch.zeros(inputs[0].shape[0], 1, 4, 128).bfloat16())


@pytest.mark.parametrize(("sms", "group", "width"), [(1, 2, 333), (3, 2, 333), (40, 2, 333), (200, 2, 16 * 270)])
def test_the_split_changes_nothing_but_rounding(monkeypatch, sms, group, width):
    """The last: more splits than a thread reads at once (8 of 8 threads), and more than there are threads."""
    monkeypatch.setattr(gather, "LEAST_SLOTS", 16)
    monkeypatch.setattr(gather, "SIMULATED_SMS", sms)
    monkeypatch.setattr(gather, "_calls", Table())
    assert gather.split(1, 16 * 270, 200) == (16, 270)
    for kind in KINDS[:3:2]:
        both(
            make(kind, group, sets=1 if sms > 40 else 2, width=width),
            sinks=torch.ones(4)[: 2 if sms > 40 else 4],
            order=7,
        )


@given(st.integers(1, 500), st.integers(1, 100_000), st.integers(1, 200))
def test_splits_cover_the_slots_once(tasks, width, sms):
    slots, splits = gather.split(tasks, width, sms)
    assert slots % gather.SLOTS == 0
    assert (splits - 1) * slots < width <= splits * slots
    assert splits == 1 or tasks * splits <= gather.BLOCKS_PER_SM * sms


def test_the_order_of_threads_changes_nothing():
    first, *others = (both(make(width=200), order) for order in (0, 1, 5, 9))
    assert all(torch.equal(other, first) for other in others)


def test_keys_and_values_are_read_where_they_lie():
    q, k, v, indices = make(tokens=60)
    room = torch.full((1, 100, 2, 128), torch.nan).to(k.dtype)  # a cache with room, tokens before heads
    room[:, :60] = k.transpose(1, 2)
    view = room[:, :60].transpose(1, 2)
    gather.check(q, view, v, indices)
    assert_close(attend(q, view, v, indices, run=device()), expected(q, k, v, indices, 0.1))


def test_results_lie_within_their_memory(monkeypatch):
    """Everything the kernels write lies between guard pages, and nothing beside it changes."""
    kept, inputs = [], make(width=150, group=3)

    def guarded_like(like):
        kept.append(torch.from_numpy(guarded(np.zeros(like.shape, np.int16), 2)))
        return kept[-1].view(like.dtype)

    def guarded_scratch(words, device):
        kept.append(torch.from_numpy(guarded(np.zeros(words, np.int32))))  # aligned to 16 bytes, as torch's memory is
        return Memory(kept[-1].data_ptr(), words, kept[-1])

    attend(*inputs, run=lambda *_: None)  # prepares the form
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", guarded_like)
        patched.setattr(gather, "scratch", guarded_scratch)
        ours = attend(*inputs, run=device())
    assert len(kept) == 2
    for held in kept:
        check_slack(held.numpy())
    assert_close(ours, expected(*inputs, 0.1))


BARRIERS = [
    # Each with what is before it: the sums of all warps are in shared memory; so are the warps' largest logits; so are
    # their sums and numbers of used slots; so are the threads' columns.
    "      }\n    }\n    __syncthreads();\n",
    "  if (lane == 0) tops[warp] = top;\n  __syncthreads();\n",
    "numbers[warp] = used;\n  __syncthreads();\n",
    "[4 * (thread % COLUMNS)], sum);\n  __syncthreads();\n",
]


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_missing_barrier_is_found(barrier):
    text = read_source(gather.KERNELS, "gather.cu")
    assert text.count(barrier) == 1
    without = text.replace(barrier, barrier.replace("__syncthreads();", ""))
    broken = Simulator(without, ["gather", "combine"], dict(gather.macros(128, 128, torch.bfloat16)))
    wrong, inputs = False, make(width=150)
    rest = rest_of(*inputs[:3])
    for order in (0, 1, 5):
        try:
            both(inputs, order, rest=rest, broken=broken)
        except (AssertionError, SimulationError):
            wrong = True
    assert wrong


def test_a_wrong_page_is_found():
    """The guard pages see a kernel that looks up the wrong page."""
    right, text = "pages.table + (token >> pages.shift)", read_source(gather.KERNELS, "gather.cu")
    assert text.count(right) == 1
    macros = dict(gather.macros(128, 128, torch.bfloat16, paged=True))
    broken = Simulator(text.replace(right, f"{right} + 300"), ["gather", "combine"], macros)
    with pytest.raises(SimulationError):
        both(make(), pages=16, broken=broken)


def test_both_kernels_start_early_and_wait_before_they_read():
    """Else they would read what is not there yet: the host simulator runs one after the other."""
    launches = []
    attend(*make(), run=lambda given, *_: launches.extend(given))
    assert [(one.kernel, one.programmatic) for one in launches] == [("gather", True), ("combine", True)]
    text = read_source(gather.KERNELS, "gather.cu")
    for one in launches:
        before, after = re.search(rf" {one.kernel}\(const.*?\n}}", text, re.S)[0].split("wait_for_predecessor();")
        assert not re.search(r"__ldg|\b(read|get|put|token_of|place_of)\(", before)
        assert "let_dependents_start();" in after  # only then is the memory that both use free


SIZES = "keys and values on CUDA must have a multiple of 16 components, at most 256, got"
REFUSED = [
    ({"kind": (128, 128, torch.float32)}, "needs bfloat16 or float16, got torch.float32; convert the model"),
    ({"group": 17}, "supports up to 16 query heads per index set, got 17"),
    ({"kind": (72, 64, torch.float16)}, f"{SIZES} 72"),
    ({"kind": (64, 272, torch.float16)}, f"{SIZES} 272"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_the_kernel_is_not_made_for_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        gather.check(*make(**options))


def test_rows_that_are_not_aligned_and_odd_pages_are_refused():
    q, k, v, indices = make()
    wide = torch.zeros(1, 2, 90, 132, dtype=k.dtype)
    with pytest.raises(ValueError, match=r"rows of keys on CUDA must be aligned to 16 bytes.*call \.clone\(\)"):
        gather.check(q, wide[..., :128], v, indices)
    with pytest.raises(ValueError, match="rows of values on CUDA must be aligned to 16 bytes"):
        gather.check(q, k, torch.zeros(1, 2, 90, 136, dtype=k.dtype)[..., 4:132], indices)
    k, v, blocks = in_pages(k, v, 24)
    with pytest.raises(ValueError, match=r"power of two of tokens, below 2\^31 in all, got 6 pages of 24"):
        attend(q, k, v, indices, blocks=blocks)
