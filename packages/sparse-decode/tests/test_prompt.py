"""Prompts of attached models on the CPU: exact and sparse ones, in chunks, without a tensor of rows times tokens."""

import copy
import tracemalloc

import pytest
import torch
from hashcore.cpu import threads
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Budget, HashSelector, attach, dense, sums
from sparse_decode import prompt as prompts_of
from sparse_decode.caches import cache_encoder, growing
from sparse_decode.caches.cache import retype
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.caches.growing import Owned
from sparse_decode.cpu import bfloat_lanes, prompt_kernels
from sparse_decode.cpu.dense import attend_rows
from sparse_decode.intervals import visible
from sparse_decode_doubles import FAMILIES, QUICK, SignHasher, generate, prompts, slow_but, tiny_model
from test_dense import TOLERANCES, attend_reference, case, close, drawn_intervals, kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer, StaticLayer

SPARSE = "rows: tiles", "rows: pairs"


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


class Sizes(TorchDispatchMode):
    """Records the most elements of a tensor that an operator makes, and the most bytes of one of float32 or float64."""

    most = floats = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and not x._is_view():
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
                self.floats = max(self.floats, x.nbytes * (x.dtype in (torch.float32, torch.float64)))
        return out


@pytest.mark.parametrize("layer", [DynamicLayer(), StaticLayer(4100)])
def test_hashing_and_sums_of_a_prompt_make_no_copy_of_all_keys_in_float32(layer, monkeypatch):
    """Of one sequence and of several; Python's own count is of what numpy allocates."""
    chunk, bits, heads = 1 << 18, 128, 2
    selector = HashSelector(Hasher(HasherConfig("planes", ModelShape(1, 2 * heads, heads, 64), bits=bits)))
    monkeypatch.setattr(cache_encoder, "_CHUNK", chunk)  # bytes
    monkeypatch.setattr(sums, "_CHUNK", chunk)
    for batch, tokens in ((1, 4096), (4, 1024)):
        k, v = torch.randn(2, batch, heads, tokens, 64).bfloat16()

        def prefill(k=k, v=v):
            held = retype(copy.deepcopy(layer), Owned(), Encoder(selector, 0))
            held.update(k, v)
            held.sums.advance(k, v, None, k.shape[2], k.device)
            held.sums.drop(k, v, 1)

        with Sizes() as sizes:
            prefill()
        weights = batch * heads * bits * bits * 4  # torch repeats a batched product's second factor
        assert 0 < sizes.floats <= max(chunk, weights) < k.numel() * 4
        tracemalloc.start()
        prefill()
        codes = batch * heads * tokens * bits // 8
        assert tracemalloc.get_traced_memory()[1] < 4 * chunk + 4 * codes
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("family", "hasher", "how"),
    [("llama", None, "sdpa"), ("llama", SignHasher(), "eager"), ("gemma3", SignHasher(), "sdpa"), ("gemma3", None, "")],
)
def test_no_tensor_has_a_number_for_each_row_and_token(family, hasher, how):
    """Prompts padded, in chunks, with windows; steps."""
    if how and not bfloat_lanes.supported():
        pytest.skip("needs a processor with AVX512_BF16")
    model = tiny_model(family, implementation=how or "sdpa", max_position_embeddings=4096)
    model = model.bfloat16() if how else model
    ids, mask = prompts((2000, 1500))
    cache, sizes = DynamicCache(config=model.config), Sizes()
    with attach(model, hasher, Budget(), dense_layers=None), torch.no_grad(), sizes:
        for first, last in ((0, 1000), (1000, 1999), (1999, 2000)):
            given = {"attention_mask": mask[:, :last], "past_key_values": cache, "logits_to_keep": 1}
            model(ids[:, first:last], **given)
    assert sizes.most < 1000 * 1000, "keys and values of a layer have 512,000 with their spare room"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [20, 70])
def test_torchs_kernel_attends_in_parts_without_a_mask(rows, dtype, monkeypatch, at_any_length):
    """A whole prompt and a chunk; sequences padded not at all, before the chunk, in it, and all of it."""
    monkeypatch.setattr(dense, "supported", lambda: False)
    q, k, v = case((4, 6, 2, rows, 70, 16, 16), dtype)
    ends = torch.arange(70 - rows + 1, 71).expand(4, -1)
    interval = torch.stack([torch.tensor([[0], [35], [60], [70]]).minimum(ends), ends], -1)[:, None]
    assert dense._starts(q, k, v, interval) == [0, 35, 60, 70]
    assert (
        dense._starts(q, k, v, interval - 1) == dense._starts(q, k, v, interval + (ends % 2)[:, None, :, None]) is None
    )
    out = dense.attend_in_parts(q, k, v, 0.3, [0, 35, 60, 70])
    expected = attend_reference(q, k, v, 0.3, visible(interval[:, 0], 70)).nan_to_num(0)
    torch.testing.assert_close(out, expected, **close(dtype))


def test_generate_feeds_long_prompts_in_chunks(monkeypatch):
    """Eager attention gets them whole: it computes what the mask of a chunk hides, too."""
    (ids, mask), rows = prompts(), []
    monkeypatch.setattr(prompts_of, "CHUNK", 20)
    for implementation in ("eager", "sdpa"):
        model = tiny_model(implementation=implementation)
        expected = generate(model, ids, mask)
        model.register_forward_pre_hook(
            lambda _, args, given: rows.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        with attach(model):
            rows.clear()
            assert torch.equal(generate(model, ids, mask), expected)
            assert rows[:3] == ([40, 1, 1] if implementation == "eager" else [20, 20, 1])
            assert max(rows[3:]) == 1
    with attach(model):
        rows.clear()
        generate(model, ids, mask, generation_config=GenerationConfig(prefill_chunk_size=30))
        assert rows[:2] == [30, 10]
        generate(model, ids, mask, use_cache=False, new_tokens=1)
        generate(model, ids, mask, output_hidden_states=True, new_tokens=1)
        assert rows[-2:] == [40, 40]
    by_length = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert not prompts_of.suits_chunks(tiny_model(rope_parameters=by_length), DynamicCache()), "whose keys would differ"
    recurrent = DynamicCache()
    recurrent.layers = [LinearAttentionLayer()]
    assert not prompts_of.suits_chunks(model, recurrent), "some begin anew with each call"
    generate(model, ids, mask, new_tokens=1)
    assert rows[-1] == 40


def test_the_last_chunk_of_a_prompt_is_no_step_if_it_has_one_token(monkeypatch):
    monkeypatch.setattr(prompts_of, "CHUNK", 13)
    (ids, mask), model = prompts(), tiny_model()
    expected = model(ids, attention_mask=mask).logits[:, -1]
    with attach(model, SignHasher(), Budget(0.1)) as attachment:
        options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
        found = model.generate(ids, attention_mask=mask, do_sample=False, **options)
        assert attachment.counts() == {}
        torch.testing.assert_close(found.logits[0], expected)


def test_a_prompt_in_chunks_leaves_no_more_room_than_one_at_once(monkeypatch):
    """Growing by an eighth, a cache of 32,768 tokens would take up to an eighth more memory, and copies of itself."""
    model, rooms = tiny_model(max_position_embeddings=4096), []
    monkeypatch.setattr(prompts_of, "CHUNK", 700)
    monkeypatch.setattr(prompts_of, "own_prompts", lambda _: True)
    buffer = growing.GrowingBuffer
    made = buffer._room
    monkeypatch.setattr(buffer, "_room", lambda self, like, n, kind: (rooms.append(n), made(self, like, n, kind))[1])
    with attach(model):
        model.generate(torch.randint(5, 90, (1, 2000)), max_new_tokens=8, do_sample=False)
    assert rooms == [2008] * 2 * model.config.num_hidden_layers


def planted(n, rows, starts, fraction, seed):
    """Draw a batch with heavy granules, as many as a block of rows chooses.

    Returns: q, k, v, intervals, and read [B, Q, N]: the tokens that a row reads by the rules of prompt_kernels.py.
    """
    batch, block, grain = len(starts), prompt_kernels.ROWS, prompt_kernels.GRANULE
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    q, k, v = draw(batch, 6, rows, 64), 0.3 * draw(batch, 2, n, 64), draw(batch, 2, n, 64)
    q[..., 0] = 8.0
    ends = torch.arange(n - rows + 1, n + 1).expand(batch, -1)
    interval = torch.stack([torch.tensor(starts)[:, None].expand_as(ends), ends], -1)
    read = visible(interval, n)[:, 0].clone()
    order = torch.randperm(n // grain, generator=generator)
    for b, start in enumerate(starts):
        heavy = [g for g in order.tolist() if start + 64 <= g * grain < n - rows - 400]
        first = -(-(start + prompt_kernels.SINK) // grain) * grain
        for r in range(0, rows, block):
            last = max(first, (n - rows + r + 1 - prompt_kernels.RECENT) // grain * grain)
            count = (last - first) // grain
            wanted = max(prompt_kernels.LEAST, -(-int(fraction * count * 1000) // 1000))
            if r == 0:
                chosen = heavy[:wanted]
                for g in chosen:  # in one KV head's keys the granules of the other hide
                    k[b, :, g * grain + 3, 0] = 4.0
            if wanted < count:
                read[b, r : r + block, first:last] = False
                for g in chosen:
                    read[b, r : r + block, g * grain : (g + 1) * grain] = True
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), interval, read


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("starts", [[0], [0, 333]])
def test_a_sparse_prompt_reads_the_heavy_granules_and_what_it_always_reads(name, starts):
    with kernel(name):
        q, k, v, interval, read = planted(1500, 40, starts, 0.0, 0)
        out = attend_rows(q, k, v, 0.125, interval, fraction=1e-6)
    expected = attend_reference(q.float(), k.float(), v.float(), 0.125, read[:, None])
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    dense = attend_reference(q.float(), k.float(), v.float(), 0.125, visible(interval, 1500))
    assert (out.float() - expected).abs().mean() < 0.2 * (dense - expected).abs().mean(), "not all tokens"


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_prompt_that_reads_all_is_exact_and_any_depends_on_no_threads(name, monkeypatch):
    with kernel(name) as (_, dtype):
        q, k, v = case((2, 6, 2, 300, 1200, 64, 64), dtype)
        interval = drawn_intervals(2, 300, 1200, None, 5)
        options = {"softcap": 2.0, "sinks": torch.linspace(-1, 1, 6)}
        exact = attend_rows(q, k, v, 0.2, interval, **options)
        torch.testing.assert_close(attend_rows(q, k, v, 0.2, interval, fraction=1.0, **options), exact, **close(dtype))
        some = attend_rows(q, k, v, 0.2, interval, fraction=0.1, **options)
        assert not torch.equal(some, exact)
        monkeypatch.setattr(threads, "TEAM_GRAIN", 1)
        torch.set_num_threads(3)
        assert torch.equal(attend_rows(q, k, v, 0.2, interval, fraction=0.1, **options), some)


def test_attach_makes_prompts_sparse_where_it_is_asked_to(monkeypatch):
    if not bfloat_lanes.supported():
        pytest.skip("needs a processor with AVX512_BF16")
    model = tiny_model(max_position_embeddings=4096).bfloat16()
    ids, asked = prompts((3000,))[0], []
    plain = model(ids).logits
    monkeypatch.setattr(dense, "attend_rows", lambda *q, **how: asked.append(how["fraction"]) or attend_rows(*q, **how))
    for hasher, layers, expected in ((None, None, [0.1] * 4), (SignHasher(), [0, 3], [None, 0.1, 0.1, None])):
        with attach(model, hasher, dense_layers=layers, prompt="sparse"):
            found = model(ids).logits
            assert asked == expected
            asked.clear()
            model(ids[:, :1000])
            assert asked == [None] * 4, "too short"
        assert not torch.equal(found, plain)
        asked.clear()
    with attach(model):
        model(ids)
    assert asked == [None] * 4


def test_sparse_prompts_are_refused_where_there_is_no_kernel(monkeypatch):
    with pytest.raises(ValueError, match="need a model in bfloat16 on a CPU with AVX512_BF16, got torch"):
        attach(tiny_model(), prompt="sparse")
    with pytest.raises(ValueError, match=r"prompt must be .* got 'dense'"):
        attach(tiny_model(), prompt="dense")
    monkeypatch.setattr(prompts_of, "supported", lambda: False)
    with pytest.raises(ValueError, match="bfloat16 on a CPU without it"):
        attach(tiny_model().bfloat16(), prompt="sparse")
