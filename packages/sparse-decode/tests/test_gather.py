"""The CUDA kernels of attention over a selection, run on the CPU under the host simulator, against `attend`."""

import re

import numpy as np
import pytest
import torch
from hashcore.cuda.kept import Memory, Table
from hashcore.cuda.source import read_source
from hostsim import SimulationError, Simulator, check_slack, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_decode.attend import attend
from sparse_decode.cuda import gather
from sparse_decode.inputs import LeftOut
from sparse_decode.positions import around
from sparse_decode_simulated import device, inside

# D, Dv, type. Head sizes of all three widths of reads, for keys and for values.
KINDS = [(128, 128, torch.bfloat16), (64, 64, torch.float16), (80, 48, torch.bfloat16), (32, 256, torch.float16)]
# Weights are rounded to the type before they multiply values of a few units; stats are float32 throughout.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
FACTS = 2e-5
ORDERS = [0, 1, 7]


def make(kind=KINDS[0], group=2, sets=2, tokens=90, width=40, batch=1, queries=1, seed=0, dead=0.1):
    dim, value_dim, dtype = kind
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, sets * group, queries, dim), (batch, sets, tokens, dim), (batch, sets, tokens, value_dim)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    indices = torch.randint(0, tokens, (batch, sets, queries, width), generator=generator)
    indices[torch.rand(indices.shape, generator=generator) < dead] = -1
    return q, k, v, indices


def assert_close(ours, expected):
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-2, atol=TOLERANCES[ours[0].dtype])
    torch.testing.assert_close(ours[1], expected[1], rtol=FACTS, atol=FACTS)


def both(inputs, scaling=0.1, softcap=None, sinks=None, order=0):
    gather.check(*inputs)
    ours = gather.attend(*(inside(x) for x in inputs), scaling, softcap, sinks, run=device(order))
    expected = attend(*inputs, scaling, softcap=softcap, sinks=sinks, lse=True)
    assert ours[0].shape == expected[0].shape
    assert_close(ours, expected)
    return ours


@settings(deadline=None, max_examples=16)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 16),
    st.sampled_from([(1, 1, 1), (2, 1, 2), (1, 2, 3)]),
    st.integers(1, 200),
    st.sampled_from([1, 15, 16, 17, 64, 65, 300]),
    st.sampled_from([None, 2.0, 30.0]),
    st.booleans(),
    st.sampled_from(ORDERS),
    st.integers(0, 99),
)
def test_equals_attention_on_the_cpu(kind, group, sizes, tokens, width, softcap, sink, order, seed):
    batch, queries, sets = sizes
    inputs = make(kind, group, sets, tokens, width, batch, queries, seed)
    sinks = torch.linspace(-3, 3, sets * group) if sink else None
    both(inputs, kind[0] ** -0.5, softcap, sinks, order)


def rest_of(q, v, indices, tokens, seed):
    """What a selection leaves out, of rows that see all tokens; the last row sees no more than it selected."""
    (batch, hq, rows, dim), generator = q.shape, torch.Generator().manual_seed(seed)
    coefficients = torch.tensor([-0.3, 0.5, 0.4, 0.02, -0.03]).repeat(hq, 1) + 0.1 * torch.rand(
        hq, 5, generator=generator
    )
    means = torch.randn(batch, v.shape[1], rows, dim, generator=generator)
    values = torch.randn(batch, hq, rows, v.shape[3], generator=generator)
    visible = torch.full((batch, rows), tokens + 1000)
    visible[-1, -1] = (indices[-1, :, -1] >= 0).sum(-1).min()
    return LeftOut(coefficients, means, values, visible)


@settings(deadline=None, max_examples=12)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([1, 7, 16]),
    st.sampled_from([(1, 1, 1), (2, 3, 2)]),
    st.sampled_from([1, 40, 300]),
    st.booleans(),
    st.sampled_from(ORDERS),
    st.integers(0, 99),
)
def test_what_is_left_out_is_added_as_on_the_cpu(kind, group, sizes, width, sink, order, seed):
    batch, queries, sets = sizes
    inputs = make(kind, group, sets, 90, width, batch, queries, seed)
    q, _, v, indices = inputs
    sinks = torch.linspace(-3, 3, sets * group) if sink else None
    rest = rest_of(q, v, indices, 90, seed)
    ours = gather.attend(*(inside(x) for x in inputs), 0.1, None, sinks, [*map(inside, rest)], run=device(order))
    assert_close(ours, attend(*inputs, 0.1, sinks=sinks, left_out=rest, lse=True))
    if batch > 1:  # the only row of the other sees no more than it selected
        assert not torch.equal(ours[0], gather.attend(*inputs, 0.1, None, sinks, run=device())[0])


@pytest.mark.parametrize(
    ("tokens", "width", "ends"),
    [(90, 40, (1, 4)), (90, 0, (3, 2)), (300, 200, (16, 7)), (5, 0, (4, 9)), (90, 17, (0, 1))],
)
@pytest.mark.parametrize("order", ORDERS)
def test_the_first_and_the_last_tokens_are_read_besides(tokens, width, ends, order):
    q, k, v, _ = make(tokens=tokens, batch=2)
    draw = torch.Generator().manual_seed(width)
    chosen = (
        [torch.randperm(tokens - sum(ends), generator=draw)[:width].sort().values + ends[0] for _ in range(4)]
        if width
        else []
    )
    indices = torch.stack(chosen).view(2, 2, 1, width) if width else torch.zeros(2, 2, 1, 0, dtype=torch.int64)
    ours = gather.attend(*(inside(x) for x in (q, k, v)), indices, 0.1, None, None, ends=ends, run=device(order))
    assert_close(ours, attend(q, k, v, around(indices, tokens, *ends), 0.1, lse=True))
    assert_close(ours, attend(q, k, v, indices, 0.1, ends=ends, lse=True))


@pytest.mark.parametrize("kind", KINDS)
def test_equals_attention_on_the_cpu_for_every_type(kind):
    both(make(kind, group=7, width=150))


def test_large_logits_do_not_overflow():
    out, stats = both(make(width=130), scaling=30.0)
    assert out.isfinite().all()
    assert stats.isfinite().all()
    assert stats[1].max() > 300


def test_what_is_not_selected_is_not_read():
    q, k, v, indices = make(width=70)
    expected = attend(q, k, v, indices, 0.1, lse=True)
    chosen = torch.zeros(k.shape[:3], dtype=torch.bool)
    for s in range(2):
        chosen[0, s, indices[0, s, 0][indices[0, s, 0] >= 0]] = True
    k[~chosen], v[~chosen] = torch.nan, torch.nan
    assert_close(gather.attend(q, k, v, indices, 0.1, None, None, run=device()), expected)


@pytest.mark.parametrize("sink", [False, True])
def test_a_row_that_selects_nothing_is_zero(sink):
    q, k, v, indices = make(queries=3, width=20)
    indices[:, :, 1] = -1
    out, stats = both((q, k, v, indices), sinks=torch.ones(4) if sink else None)
    assert (out[:, 1] == 0).all()
    assert (stats[0, :, 1] == 0).all()
    assert (stats[1, :, 1] == -torch.inf).all()


def test_nothing_to_attend_to_launches_nothing():
    q, k, v, indices = make()
    for inputs in ((q, k, v, indices[..., :0]), (q[:0], k[:0], v[:0], indices[:0])):
        out, stats = gather.attend(*inputs, 0.1, None, None, run=lambda *_: pytest.fail("launched"))
        assert out.shape == (inputs[0].shape[0], 1, 4, 128)
        assert (stats[1] == -torch.inf).all()


def test_indices_beyond_the_keys_are_unused():
    q, k, v, indices = make(dead=0)
    beyond = indices.clone()
    beyond[..., ::3] = torch.tensor([90, -5, 2**40, -(2**62)]).repeat(10)[: beyond[..., ::3].shape[-1]]
    unused = indices.clone()
    unused[..., ::3] = -1
    ours = gather.attend(q, k, v, beyond, 0.1, None, None, run=device())
    assert_close(ours, attend(q, k, v, unused, 0.1, lse=True))


@pytest.mark.parametrize("sms", [1, 3, 40])
def test_the_split_changes_nothing_but_rounding(monkeypatch, sms):
    monkeypatch.setattr(gather, "LEAST_SLOTS", 16)
    monkeypatch.setattr(gather, "SIMULATED_SMS", sms)
    monkeypatch.setattr(gather, "_calls", Table())
    both(make(width=333), order=7)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
def test_many_splits_are_combined(monkeypatch, kind):
    """More than a thread reads at once (8 of 8 threads), and more than there are threads."""
    monkeypatch.setattr(gather, "LEAST_SLOTS", 16)
    monkeypatch.setattr(gather, "SIMULATED_SMS", 200)
    monkeypatch.setattr(gather, "_calls", Table())
    assert gather.split(1, 16 * 270, 200) == (16, 270)
    both(make(kind, group=2, sets=1, width=16 * 270), sinks=torch.ones(2), order=7)


@given(st.integers(1, 500), st.integers(1, 100_000), st.integers(1, 200))
def test_splits_cover_the_slots_once(tasks, width, sms):
    slots, splits = gather.split(tasks, width, sms)
    assert slots % gather.SLOTS == 0
    assert (splits - 1) * slots < width <= splits * slots
    assert splits == 1 or tasks * splits <= gather.BLOCKS_PER_SM * sms


def test_the_order_of_threads_changes_nothing():
    inputs = make(width=200)
    first, *others = (gather.attend(*inputs, 0.1, None, None, run=device(order)) for order in (0, 1, 5, 9))
    for other in others:
        assert torch.equal(other[0], first[0])
        assert torch.equal(other[1], first[1])


def test_keys_and_values_are_read_where_they_lie():
    q, k, v, indices = make(tokens=60)
    room = torch.full((1, 100, 2, 128), torch.nan).to(k.dtype)  # a cache with room, tokens before heads
    room[:, :60] = k.transpose(1, 2)
    view = room[:, :60].transpose(1, 2)
    gather.check(q, view, v, indices)
    ours = gather.attend(q, view, v, indices, 0.1, None, None, run=device())
    assert_close(ours, attend(q, k, v, indices, 0.1, lse=True))


def test_results_lie_within_their_memory(monkeypatch):
    """Everything the kernels write lies between guard pages, and nothing beside it changes."""
    kept = []

    def guarded_empty(self, *shape, dtype=None):
        kind = {None: np.int16, torch.int32: np.int32, torch.float32: np.float32}[dtype]
        held = torch.from_numpy(guarded(np.zeros(shape, kind), np.dtype(kind).itemsize))
        kept.append(held)
        return held if dtype else held.view(self.dtype)

    def guarded_like(like):
        return guarded_empty(like, *like.shape)

    def guarded_scratch(words, device):
        memory = torch.from_numpy(guarded(np.zeros(words, np.int32)))  # aligned to 16 bytes, as torch's memory is
        kept.append(memory)
        return Memory(memory.data_ptr(), words, memory)

    inputs = make(width=150, group=3)
    gather.attend(*inputs, 0.1, None, None, run=lambda *_: None)  # prepares the form
    monkeypatch.setattr(torch.Tensor, "new_empty", guarded_empty)
    monkeypatch.setattr(torch, "empty_like", guarded_like)
    monkeypatch.setattr(gather, "scratch", guarded_scratch)
    ours = gather.attend(*inputs, 0.1, None, None, run=device())
    monkeypatch.undo()
    assert len(kept) == 3
    for held in kept:
        check_slack(held.numpy())
    assert_close(ours, attend(*inputs, 0.1, lse=True))


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
    inputs = make(width=150)
    macros = gather.macros(128, 128, torch.bfloat16)
    without = text.replace(barrier, barrier.replace("__syncthreads();", ""))
    broken = Simulator(without, ["gather", "combine"], dict(macros))
    wrong = False
    for order in (0, 1, 5):
        try:
            ours = gather.attend(*inputs, 0.1, None, None, run=device(order, broken))
            assert_close(ours, attend(*inputs, 0.1, lse=True))
        except (AssertionError, SimulationError):
            wrong = True
    assert wrong


def test_both_kernels_start_early_and_wait_before_they_read():
    """Else they would read what is not there yet: the host simulator runs one after the other."""
    launches = []
    gather.attend(*make(), 0.1, None, None, run=lambda given, *_: launches.extend(given))
    assert [(one.kernel, one.programmatic) for one in launches] == [("gather", True), ("combine", True)]
    text = read_source(gather.KERNELS, "gather.cu")
    for one in launches:
        before, after = re.search(rf" {one.kernel}\(const.*?\n}}", text, re.S)[0].split("wait_for_predecessor();")
        assert not re.search(r"__ldg|\b(read|get|put|token_of|place_of)\(", before)
        assert "let_dependents_start();" in after  # only then is the memory that both use free


REFUSED = [
    ({"kind": (128, 128, torch.float32)}, "needs bfloat16 or float16, got torch.float32; convert the model"),
    ({"group": 17}, "supports up to 16 query heads per index set, got 17"),
    (
        {"kind": (72, 64, torch.float16)},
        "keys and values on CUDA must have a multiple of 16 components, at most 256, got 72",
    ),
    ({"kind": (64, 272, torch.float16)}, "values on CUDA must have a multiple of 16 components, at most 256, got 272"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_the_kernel_is_not_made_for_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        gather.check(*make(**options))


def test_rows_that_are_not_aligned_are_refused():
    q, k, v, indices = make()
    wide = torch.zeros(1, 2, 90, 132, dtype=k.dtype)
    with pytest.raises(ValueError, match=r"rows of keys on CUDA must be aligned to 16 bytes.*call \.clone\(\)"):
        gather.check(q, wide[..., :128], v, indices)
    with pytest.raises(ValueError, match="rows of values on CUDA must be aligned to 16 bytes"):
        gather.check(q, k, torch.zeros(1, 2, 90, 136, dtype=k.dtype)[..., 4:132], indices)
