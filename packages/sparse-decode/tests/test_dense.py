"""Dense attention on the CPU: each kernel, of steps and of prompts, against the reference; which calls they serve."""

import os
import platform
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from hashcore.cpu import threads
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from sparse_decode import Budget, attach, interface
from sparse_decode import dense as dense_step
from sparse_decode.budget import LayerBudget
from sparse_decode.cpu import bfloat_lanes, dense
from sparse_decode.cpu.dense import attend_all, attend_rows
from sparse_decode.intervals import visible
from sparse_decode_doubles import QUICK, UNUSUAL, SignHasher, prompts, slow_but, tiny_model
from transformers import DynamicCache, StaticCache

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# "bfloat16": by pairs where the processor has AVX512_BF16; "widened": as on processors without it.
STEPS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "widened": torch.bfloat16}
PROMPTS = dict.fromkeys(("rows: tiles", "rows: pairs", "rows: blocks"), torch.bfloat16)  # of prompts, many rows at once
PROMPTS["rows: float32"] = torch.float32
KERNELS = STEPS | PROMPTS
OF_BFLOAT16 = ["bfloat16", "widened", "rows: tiles", "rows: pairs"]
# batch, query heads, KV heads, rows, N, D, Dv: edges of lanes, lines, tiles, blocks, chunks and tasks
SHAPES = [
    *((1, 1, 1, 1, 1, 1, 1), (2, 6, 2, 3, 37, 16, 16), (1, 9, 3, 1, 513, 64, 64), (1, 7, 1, 16, 257, 33, 20)),
    *((1, 14, 2, 5, 2311, 64, 64), (1, 2, 2, 1, 1025, 288, 256)),
]
LONG_SHAPES = [
    *((1, 9, 3, 300, 300, 64, 64), (2, 6, 2, 70, 137, 16, 48), (1, 7, 1, 129, 1100, 33, 20)),
    *((1, 4, 4, 17, 577, 96, 96), (1, 2, 2, 65, 65, 288, 256)),
]
CASES = [(name, shape) for name in KERNELS for shape in SHAPES]
CASES += [(name, shape) for name in PROMPTS for shape in LONG_SHAPES]


def attend_reference(q, k, v, scaling, mask=None, *, softcap=None, sinks=None):
    """Compute dense attention with plain torch operations."""
    (rows, n), group = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
    k, v = (x.to(torch.promote_types(x.dtype, torch.float32)).repeat_interleave(group, 1) for x in (k, v))
    seen = torch.ones(rows, n, dtype=torch.bool).tril(n - rows) if mask is None else mask
    logits = q.to(k.dtype) @ k.transpose(2, 3) * scaling
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~seen, -torch.inf)
    sink = torch.full((q.shape[1],), -torch.inf) if sinks is None else sinks
    logits = torch.cat([logits, sink.to(k.dtype)[:, None, None].expand(*logits.shape[:3], 1)], -1)
    return (logits.softmax(-1)[..., :n] @ v).transpose(1, 2).to(q.dtype)


@pytest.fixture(autouse=True)
def _our_kernel_at_any_length(monkeypatch):
    for module in (interface, dense_step):
        monkeypatch.setattr(module, "OWN_FROM", dict.fromkeys(dense_step.OWN_FROM, 0))
    for name in ("PROMPT_FROM", "MASKED_FROM"):
        monkeypatch.setattr(dense_step, name, 0)


@contextmanager
def kernel(name):
    """Give a kernel's function and the type that it multiplies; skip where the processor lacks it."""
    with pytest.MonkeyPatch.context() as patch:
        if name in ("widened", "rows: blocks"):
            patch.setattr(dense, "supported", lambda: False)
        if name == "rows: tiles" and not bfloat_lanes.granted():
            pytest.skip("needs a processor with AMX for bfloat16")
        if name == "rows: pairs":
            patch.setattr(dense, "granted", lambda: False)
        if name in ("rows: tiles", "rows: pairs") and not bfloat_lanes.supported():
            pytest.skip("needs a processor with AVX512_BF16")
        yield attend_all if name in STEPS else attend_rows, KERNELS[name]


def case(shape, dtype=torch.float32, seed=0):
    batch, hq, hkv, rows, n, dim, dim_v = shape
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator).to(dtype)  # noqa: E731
    return draw(batch, hq, rows, dim), draw(batch, hkv, n, dim), draw(batch, hkv, n, dim_v)


def drawn_intervals(batch, rows, n, window, seed):
    """Left-padded sequences, some with a window; a row before its sequence starts sees nothing."""
    starts = torch.randint(0, n, (batch, 1), generator=torch.Generator().manual_seed(seed))
    ends = torch.arange(n - rows + 1, n + 1).expand(batch, -1)
    starts = starts.minimum(ends)
    return torch.stack([starts if window is None else starts.maximum(ends - window), ends], -1)


def close(dtype):
    return {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}


def with_cases(test):
    """Let a test run all CASES first."""
    for name, (batch, hq, hkv, *sizes) in reversed(CASES):
        sizes = batch, hq // hkv, hkv, *sizes
        test = example(sizes=sizes, name=name, padded=False, window=None, softcap=None, sunk=False, seed=0)(test)
    return test


@with_cases
@settings(max_examples=100, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 4, 3, 200, 700, 70, 70))),
    name=st.sampled_from([name for name in KERNELS if name != "rows: tiles"]),
    padded=st.booleans(),
    window=st.sampled_from([None, None, 1, 40]),
    softcap=st.sampled_from([None, 0.5]),
    sunk=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_equals_the_reference_whatever_the_shape_and_the_rows_see(sizes, name, padded, window, softcap, sunk, seed):
    batch, group, hkv, rows, n, dim, dim_v = sizes
    assume(name != "rows: tiles" or bfloat_lanes.granted())
    assume(name != "rows: pairs" or bfloat_lanes.supported())
    name = "rows: tiles" if name == "rows: pairs" and bfloat_lanes.granted() and seed % 2 else name
    rows = min(rows, n, 6 if name in STEPS else n)
    options = {"softcap": softcap, "sinks": torch.linspace(-4, 4, group * hkv) if sunk else None}
    interval = drawn_intervals(batch, rows, n, window, seed) if padded else None
    with kernel(name) as (attend, dtype):
        q, k, v = case((batch, group * hkv, hkv, rows, n, dim, dim_v), dtype, seed)
        out = attend(q, k, v, 0.3, interval, **options)
    assert out.dtype == dtype
    expected = attend_reference(q, k, v, 0.3, None if interval is None else visible(interval, n), **options)
    if interval is not None:
        expected = expected.masked_fill((interval[..., 0] == interval[..., 1])[..., None, None], 0)
    torch.testing.assert_close(out, expected, **close(dtype))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OF_BFLOAT16)
@pytest.mark.parametrize(("scaling", "grows"), [(0.125, 0), (1.0, 0), (0.125, 3), (0.125, 30)])
def test_errors_of_bfloat16_are_those_of_rounding(scaling, grows, name):
    """Rounded outputs are off by 1.7e-3 of their size, root mean square; rounded weights add as much at the most."""
    q, k, v = case((1, 14, 2, 3 if name in STEPS else 100, 4000, 64, 64), torch.bfloat16)
    k *= torch.linspace(1, 1 + grows, 4000)[:, None]  # the largest logit comes late
    exact = attend_reference(*(x.double() for x in (q, k, v)), scaling)
    with kernel(name) as (attend, _):
        off = attend(q, k, v, scaling).double() - exact
    assert off.square().mean().sqrt() < 2.6e-3 * exact.square().mean().sqrt()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OF_BFLOAT16)
def test_threads_change_nothing(name, monkeypatch):
    with kernel(name) as (attend, dtype):
        q, k, v = case((2, 6, 2, 3, 2000, 48, 40) if name in STEPS else (1, 9, 3, 700, 700, 64, 64), dtype)
        serial = attend(q, k, v, 0.3, softcap=2.0)
        monkeypatch.setattr(threads, "TEAM_GRAIN", 1)
        for count in (2, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(attend(q, k, v, 0.3, softcap=2.0), serial) for _ in range(10))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (4, 3, 16, 530, 70, 70))),
    name=st.sampled_from(list(STEPS)),
    softcap=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 1 << 20),
)
@example(sizes=(3, 3, 2, 33, 64, 64), name="float32", softcap=None, seed=0)  # a whole tile less
@example(sizes=(7, 2, 5, 1026, 64, 64), name="bfloat16", softcap=None, seed=0)  # a whole task less
def test_a_row_has_the_same_bits_alone_and_among_others(sizes, name, softcap, seed):
    group, hkv, rows, n, dim, dim_v = sizes
    rows = min(rows, n)
    q, k, v = case((1, group * hkv, hkv, rows, n, dim, dim_v), KERNELS[name], seed)
    with kernel(name):
        together = attend_all(q, k, v, 0.3, None, softcap=softcap)
        for row in range(rows):
            end = n - rows + 1 + row
            alone = attend_all(q[:, :, row : row + 1], k[:, :, :end], v[:, :, :end], 0.3, softcap=softcap)
            assert torch.equal(together[:, row], alone[:, 0])


@pytest.mark.parametrize("name", ["rows: tiles", "rows: pairs"])
def test_rows_of_a_prompt_do_not_depend_on_its_chunks(name):
    with kernel(name) as (_, dtype):
        q, k, v = case((1, 9, 3, 700, 700, 64, 64), dtype)
        cuts = (0, 130), (130, 611), (611, 700)
        parts = [attend_rows(q[:, :, a:b], k[:, :, :b], v[:, :, :b], 0.2) for a, b in cuts]
        assert torch.equal(torch.cat(parts, 1), attend_rows(q, k, v, 0.2))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("hidden", [290, 1300], ids=["a chunk", "a task"])
def test_hidden_tokens_may_be_anything_and_keys_lie_anywhere(hidden, name):
    with kernel(name) as (attend, dtype):
        rows = 2 if name in STEPS else 150
        q, k, v = case((1, 6, 2, rows, 1600, 64, 64), dtype)
        interval = torch.stack([torch.full((1, rows), hidden), torch.arange(1601 - rows, 1601)[None]], -1)
        expected = attend(q, k, v, 0.3, interval)
        k[:, :, :hidden], v[:, :, :hidden] = torch.nan, torch.inf
        assert torch.equal(attend(q, k, v, 0.3, interval), expected)
        by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
        roomy = [torch.cat([x, torch.full_like(x, torch.nan)], 2)[:, :, : x.shape[2]] for x in (k, v)]
        for strided in (by_token, roomy):
            assert torch.equal(attend(q, *strided, 0.3, interval), expected)
        q[0, 5, 1] = torch.nan
        out = attend(q, k, v, 0.3, interval)
        assert out[0, 1, 5].isnan().all()
        out[0, 1, 5] = expected[0, 1, 5]
        assert torch.equal(out, expected), "a row of NaN stays alone"
        k[0, 1, 1400] = torch.nan
        assert attend(q, k, v, 0.3, interval)[:, :, 3:].isnan().all(), "a NaN that is seen is not hidden"


@pytest.mark.parametrize("name", STEPS)
def test_a_row_that_sees_no_token_of_a_chunk_is_as_if_it_were_not_there(name):
    """Its first tokens are in the last of two tasks, another row's in all chunks."""
    with kernel(name) as (attend, dtype):
        q, k, v = case((1, 6, 2, 2, 1600, 64, 64), dtype)
        interval = torch.tensor([[[1350, 1600], [0, 1600]]])
        expected = attend_reference(q, k, v, 0.3, visible(interval, 1600))
        torch.testing.assert_close(attend(q, k, v, 0.3, interval), expected, **close(dtype))


@pytest.mark.parametrize("name", KERNELS)
def test_a_visible_key_that_is_not_a_number_gives_nan_and_not_a_row_without_tokens(name):
    with kernel(name) as (attend, dtype):
        for value, at, n in ((torch.nan, 0, 40), (torch.inf, 39, 40), (torch.inf, 0, 600), (torch.nan, 39, 600)):
            q, k, v = case((1, 2, 1, 1, n, 32, 32), dtype)
            k[0, 0, at] = value
            assert attend(q, k, v, 1.0).isnan().all()
            k[:] = torch.nan
            assert attend(q, k, v, 1.0).isnan().all()


def steps(model, rows, length=40):
    """Logits of two decode steps of so many rows after a padded prompt."""
    ids, mask = prompts((length, length - 13))
    cache, past = DynamicCache(config=model.config), length - 2 * rows
    model(ids[:, :past], attention_mask=mask[:, :past], past_key_values=cache)
    found = []
    for first in (past, past + rows):
        last = first + rows
        found.append(model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache).logits)
    return torch.stack(found)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", slow_but(QUICK, UNUSUAL))
def test_dense_layers_of_attached_models_are_as_dense(family, rows, monkeypatch):
    """One layer is sparse in name, and below its break-even; windows slide in some families. The prompt is padded."""
    model, served = tiny_model(family), []
    expected = steps(model, rows)

    def counted(*given, **options):
        served.append(given[0].shape[2])
        return attend_all(*given, **options)

    monkeypatch.setattr(dense_step, "attend_all", counted)
    for of_prompts in ("attend_rows", "attend_in_parts"):
        own = getattr(dense_step, of_prompts)
        monkeypatch.setattr(dense_step, of_prompts, lambda *x, own=own, **how: served.append(0) or own(*x, **how))
    with attach(model, SignHasher(), LayerBudget(0.1, dense_below=1000), dense_layers=[0, 2, 1]):
        torch.testing.assert_close(steps(model, rows), expected, atol=2e-4, rtol=2e-4)
    assert served == [0] * 4 + [rows] * 2 * 4


def test_a_dense_layer_grows_in_place_and_is_plain_after_detach():
    model, ids = tiny_model(), prompts((40,))[0]
    cache = DynamicCache(config=model.config)
    with attach(model, SignHasher(), Budget(), dense_layers=2) as attachment:
        model(ids[:, :-3], past_key_values=cache)
        model(ids[:, -3:-2], past_key_values=cache)
        where = cache.layers[0].keys.data_ptr()
        model(ids[:, -2:-1], past_key_values=cache)
        assert cache.layers[0].keys.data_ptr() == where
        assert attachment.memory(cache)[1] == 2 * 39 * 2 * 16, "codes of the two sparse layers alone"
    assert {type(layer).__name__ for layer in cache.layers} == {"DynamicLayer"}
    assert cache.get_seq_length() == 39


def test_a_static_cache_is_read_up_to_its_length():
    model, ids = tiny_model(), prompts((40,))[0]
    expected = model(ids).logits[:, -1]
    with attach(model, SignHasher(), LayerBudget(0.1, dense_below=1000), dense_layers=1):
        cache = StaticCache(config=model.config, max_cache_len=600)
        model(ids[:, :-1], past_key_values=cache)
        for layer in cache.layers:
            layer.keys[:, :, 40:], layer.values[:, :, 40:] = torch.nan, torch.nan
        found = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_a_short_step_goes_the_models_own_way(monkeypatch):
    model, ids = tiny_model(), prompts((40,))[0]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
    for module in (interface, dense_step):
        monkeypatch.setattr(module, "OWN_FROM", dict.fromkeys(dense_step.OWN_FROM, 256))
    monkeypatch.setattr(dense_step, "PROMPT_FROM", 256)
    for name in ("attend_all", "attend_rows"):
        monkeypatch.setattr(dense_step, name, lambda *_, **__: pytest.fail("too short for our kernel"))
    with attach(model, SignHasher(), LayerBudget(0.1, dense_below=1000), dense_layers=2):
        found = model.generate(ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
    assert all(torch.equal(*pair) for pair in zip(found.logits, expected.logits, strict=True))


def test_the_instruction_is_used_where_numba_compiles_for_it():
    """numba's cache tells kernels apart by the processor and its features; the choice must follow the same."""
    assert bfloat_lanes.supported() == bool(getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16"))
    code = "from sparse_decode.cpu.bfloat_lanes import supported; assert not supported()"
    plain = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    subprocess.run([sys.executable, "-c", code], env=plain, check=True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64")
@pytest.mark.parametrize("tiles", ["", ",+amx-tile,+amx-bf16"])
def test_prompts_compile_for_processors_with_and_without_amx(tiles, tmp_path):
    """A kernel has both ways, and LLVM ends the process over an instruction that the processor lacks."""
    code = """
import numba, torch
from sparse_decode.cpu import dense
names = []
def compile_only(kernel, tasks, work, *arguments):
    names.append(kernel.__name__)
    dense.compiled(kernel).compile(tuple(map(numba.typeof, (0, 0, *arguments))))
dense.run, x = compile_only, torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)
dense.attend_rows(x, x, x, 1.0)
assert names == ["lay_out", "lay_out", "attend"], names
"""
    features = "+avx2,+fma,+f16c,+bmi2,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512bf16" + tiles
    other = {"NUMBA_CPU_NAME": "x86-64-v4", "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=os.environ | other, check=True)
