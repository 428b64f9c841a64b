"""Dense attention of prompts on the CPU: each kernel against the reference, and what a row depends on."""

from contextlib import contextmanager

import pytest
import torch
from hashcore.cpu import threads
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_decode import Budget, attach, dense
from sparse_decode import prompt as prompts_of_models
from sparse_decode.cpu import bfloat_lanes, prompt, tiles
from sparse_decode.cpu.prompt import attend_rows
from sparse_decode.intervals import causal, visible
from sparse_decode_doubles import FAMILIES, QUICK, SignHasher, generate, prompts, slow_but, tiny_model
from test_dense import attend_all_reference, case, close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationConfig

KERNELS = ["tiles", "pairs", "blocks", "float32"]


@contextmanager
def kernel(name):
    """Let this kernel attend, and give the type that it takes; skip where the processor lacks it."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "tiles" and not tiles.granted():
            pytest.skip("needs a processor with AMX for bfloat16")
        if name == "pairs":
            patch.setattr(tiles, "granted", lambda: False)
        if name in ("tiles", "pairs") and not bfloat_lanes.supported():
            pytest.skip("needs a processor with AVX512_BF16")
        if name == "blocks":
            patch.setattr(prompt, "supported", lambda: False)
        yield torch.float32 if name == "float32" else torch.bfloat16


# batch, query heads, KV heads, rows, N, D, Dv: edges of lines, blocks, chunks and tasks
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (1, 9, 3, 300, 300, 64, 64),
    (2, 6, 2, 70, 137, 16, 48),
    (1, 7, 1, 129, 1100, 33, 20),
    (1, 4, 4, 17, 577, 96, 96),
    (1, 2, 2, 65, 65, 288, 256),
]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape, name):
    with kernel(name) as dtype:
        q, k, v = case(shape, dtype)
        out = attend_rows(q, k, v, 0.3)
    torch.testing.assert_close(out, attend_all_reference(q, k, v, 0.3), **close(dtype))


def drawn_intervals(batch, rows, n, window, seed):
    """Left-padded sequences, some with a window; a row before its sequence starts sees nothing."""
    starts = torch.randint(0, n, (batch, 1), generator=torch.Generator().manual_seed(seed))
    ends = torch.arange(n - rows + 1, n + 1).expand(batch, -1)
    starts = starts.minimum(ends)
    return torch.stack([starts if window is None else starts.maximum(ends - window), ends], -1)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 4, 3, 200, 700, 70, 70))),
    name=st.sampled_from(KERNELS[1:]),
    window=st.sampled_from([None, 1, 40]),
    softcap=st.sampled_from([None, 0.5]),
    sunk=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_equals_the_reference_whatever_the_shape_and_the_rows_see(sizes, name, window, softcap, sunk, seed):
    batch, group, hkv, rows, n, dim, dim_v = sizes
    name = "tiles" if name == "pairs" and tiles.granted() and seed % 2 else name
    rows = min(rows, n)
    options = {"softcap": softcap, "sinks": torch.linspace(-4, 4, group * hkv) if sunk else None}
    interval = drawn_intervals(batch, rows, n, window, seed)
    with kernel(name) as dtype:
        q, k, v = case((batch, group * hkv, hkv, rows, n, dim, dim_v), dtype, seed)
        out = attend_rows(q, k, v, 0.3, interval, **options)
    empty = (interval[..., 0] == interval[..., 1])[..., None, None]
    expected = attend_all_reference(q, k, v, 0.3, visible(interval, n), **options).masked_fill(empty, 0)
    torch.testing.assert_close(out, expected, **close(dtype))


@pytest.mark.parametrize("name", KERNELS[:2])
def test_a_row_depends_neither_on_chunks_nor_on_threads(name, monkeypatch):
    with kernel(name) as dtype:
        q, k, v = case((1, 9, 3, 700, 700, 64, 64), dtype)
        whole = attend_rows(q, k, v, 0.2)
        parts = [
            attend_rows(q[:, :, a:b], k[:, :, :b], v[:, :, :b], 0.2) for a, b in ((0, 130), (130, 611), (611, 700))
        ]
        assert torch.equal(torch.cat(parts, 1), whole)
        monkeypatch.setattr(threads, "TEAM_GRAIN", 1)
        torch.set_num_threads(3)
        assert all(torch.equal(attend_rows(q, k, v, 0.2), whole) for _ in range(10))


@pytest.mark.parametrize("name", KERNELS[:2])
@pytest.mark.parametrize(("scaling", "grows"), [(0.125, 0), (1.0, 0), (0.125, 30)])
def test_errors_of_bfloat16_are_those_of_rounding(scaling, grows, name):
    """Rounded outputs are off by 1.7e-3 of their size, root mean square; rounded weights add as much at the most."""
    q, k, v = case((1, 14, 2, 100, 4000, 64, 64), torch.bfloat16)
    k *= torch.linspace(1, 1 + grows, 4000)[:, None]  # weights from 1 down to what float32 cannot hold
    exact = attend_all_reference(*(x.double() for x in (q, k, v)), scaling)
    with kernel(name):
        off = attend_rows(q, k, v, scaling).double() - exact
    assert off.square().mean().sqrt() < 2.6e-3 * exact.square().mean().sqrt()


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_of_nan_stays_alone(name):
    with kernel(name) as dtype:
        q, k, v = case((1, 6, 2, 200, 200, 64, 64), dtype)
        expected = attend_rows(q, k, v, 0.2)
        q[0, 3, 77] = torch.nan
        out = attend_rows(q, k, v, 0.2)
    assert out[0, 77, 3].isnan().all()
    out[0, 77, 3] = expected[0, 77, 3]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", KERNELS)
def test_hidden_tokens_may_be_anything(name):
    interval = causal(1, 150, 400, torch.device("cpu")).clone()
    interval[..., 0] = 30
    with kernel(name) as dtype:
        q, k, v = case((1, 6, 2, 150, 400, 64, 64), dtype)
        expected = attend_rows(q, k, v, 0.2, interval)
        k[:, :, :30], v[:, :, :30] = torch.nan, torch.inf
        assert torch.equal(attend_rows(q, k, v, 0.2, interval), expected)


@pytest.fixture
def at_any_length(monkeypatch):
    for name in ("PROMPT_FROM", "MASKED_FROM"):
        monkeypatch.setattr(dense, name, 0)


def in_chunks(model, ids, mask, size):
    """Logits of a padded batch, fed in chunks of `size` rows."""
    cache, found = DynamicCache(config=model.config), []
    for first in range(0, ids.shape[1], size):
        last = min(first + size, ids.shape[1])
        chunk = model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache)
        found.append(chunk.logits)
    return torch.cat(found, 1)[mask.bool()].float()


@pytest.mark.parametrize("size", [60, 22])
@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_prompts_are_as_near_to_float32_as_the_models_own(family, size, at_any_length):
    model, (ids, mask) = tiny_model(family), prompts((60, 33))
    exact = in_chunks(model, ids, mask, size)
    with attach(model):
        torch.testing.assert_close(in_chunks(model, ids, mask, size), exact, atol=2e-4, rtol=2e-4)
    model.bfloat16()
    off = (in_chunks(model, ids, mask, size) - exact).norm()
    with attach(model):
        assert (in_chunks(model, ids, mask, size) - exact).norm() < 1.25 * off


def test_nothing_is_lost_without_a_hasher(at_any_length):
    model, (ids, mask) = tiny_model(), prompts()
    expected, cache = generate(model, ids, mask), DynamicCache(config=model.config)
    with attach(model) as attachment:
        assert (attachment.layers, attachment.remainder, attachment.break_even) == ((), False, None)
        assert torch.equal(generate(model, ids, mask, past_key_values=cache), expected)
        assert attachment.density() == {}
    assert model.config._attn_implementation == "sdpa"
    assert {type(layer).__name__ for layer in cache.layers} == {"DynamicLayer"}


def test_without_a_hasher_long_caches_grow_in_place(monkeypatch):
    model, ids = tiny_model(), prompts((40,))[0].repeat(1, 14)[:, :-1]
    cache = DynamicCache(config=model.config)
    with attach(model), torch.no_grad():
        for first, last in ((0, 530), (530, 531), (531, 532)):
            model(ids[:, first:last], past_key_values=cache)
            where, cache.where = getattr(cache, "where", None), [x.keys.data_ptr() for x in cache.layers]
        assert cache.where == where


class Sizes(TorchDispatchMode):
    """Records the most elements of a tensor that an operator makes."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and not x._is_view():
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("hasher", [None, SignHasher()])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_no_tensor_has_a_number_for_each_row_and_token(family, hasher, implementation):
    """Prompts padded, in chunks, with windows; steps."""
    if not bfloat_lanes.supported():
        pytest.skip("needs a processor with AVX512_BF16")
    model = tiny_model(family, implementation=implementation, max_position_embeddings=4096).bfloat16()
    ids, mask = prompts((2000, 1500))
    cache, sizes = DynamicCache(config=model.config), Sizes()
    with attach(model, hasher, Budget(), dense_layers=None), torch.no_grad(), sizes:
        for first, last in ((0, 1000), (1000, 1999), (1999, 2000)):
            given = {"attention_mask": mask[:, :last], "past_key_values": cache, "logits_to_keep": 1}
            model(ids[:, first:last], **given)
    assert sizes.most < 1000 * 1000, "keys and values of a layer have 512,000 with their spare room"


def test_generate_feeds_long_prompts_in_chunks(monkeypatch):
    model, (ids, mask) = tiny_model(), prompts()
    monkeypatch.setattr(prompts_of_models, "CHUNK", 16)
    expected, rows = generate(model, ids, mask), []
    model.register_forward_pre_hook(lambda _, args, given: rows.append(given["input_ids"].shape[1]), with_kwargs=True)
    with attach(model):
        assert torch.equal(generate(model, ids, mask), expected)
        assert rows[:3] == [16, 16, 8]
        assert max(rows[3:]) == 1
        rows.clear()
        generate(model, ids, mask, generation_config=GenerationConfig(prefill_chunk_size=30))
        assert rows[:2] == [30, 10]
        rows.clear()
        generate(model, ids, mask, use_cache=False, new_tokens=2)
        assert rows == [40, 41]
    rows.clear()
    generate(model, ids, mask, new_tokens=2)
    assert rows == [40, 1]
