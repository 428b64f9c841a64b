"""The GPU backend on stand-ins for vLLM: results under the host simulator, launches with fake CUDA tensors."""

import functools
from dataclasses import replace

import pytest
import serve_doubles
import torch
from fake_gpu import Operators, fake_gpu
from serve_doubles import DIM, HEADS, LONGEST, QUERIES, SIZE, WORDS, Common, Requests, built, engine, impls, pool
from sparse_decode.pages import Step
from sparse_decode_simulated import send_steps
from sparse_serve.layout import pages_of
from sparse_serve.served import Served

CLOSE = {"rtol": 1e-2, "atol": 2e-2}  # bfloat16
SPEC = serve_doubles.FullAttentionSpec(dtype=torch.bfloat16)


def made(backend, asked, layers=2, **settings):
    """An engine whose first layer is dense: its config, and spec and builder of the others."""
    given = {"spotlight": asked["spotlight"] | {"sink": 1, "recent": 4, "dense_layers": [0]} | settings}
    config, specs = engine(backend, given, [(SPEC, {})] * layers)
    return config, specs[1], built(backend, config, specs)[1]


STEPS = [{"a": 70, "b": 25}, {"a": 1, "b": 1, "c": 40}, {"b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}]


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.1])
def test_steps_are_those_of_vllm_and_of_the_cpu(gpu_backend, asked, monkeypatch, fraction, tokens_first):
    """At 100 % as dense attention; below as `PagedLayer` on the CPU. Prompts are FlashAttention's."""
    kernels, (config, spec, builder) = send_steps(monkeypatch), made(gpu_backend, asked, fraction=fraction)
    (_, impl), stock = impls(config), serve_doubles.FlashImpl()
    cache, requests = pool(spec, tokens_first=tokens_first), Requests()
    for tokens in STEPS:
        common, (q, k, v) = requests.step(tokens)
        metadata = builder.build(0, common)
        impl.do_kv_cache_update(None, k, v, cache, common.slot_mapping)
        out = impl.forward(None, q, k, v, cache, metadata, torch.full_like(q, torch.nan))
        dense = stock.forward(None, q, k, v, cache, common, torch.empty_like(out))
        rows = sum(count == 1 for count in tokens.values())
        assert metadata.spotlight.decodes == rows
        torch.testing.assert_close(out[rows:], dense[rows:], rtol=0, atol=0)
        expected = dense[:rows]
        if fraction < 1 and rows:
            pages, budget = pages_of(cache, WORDS), Served.of(config).budget
            step = Step.of(common.block_table_tensor[:rows], common.seq_lens[:rows], budget, len(cache), SIZE)
            expected = impl.paged.decode(q[:rows], pages, step)
        torch.testing.assert_close(out[:rows], expected, **CLOSE)
        assert out.isfinite().all()
    assert impl.forwarded == [95, 40]
    assert kernels.count("place_codes") == len(STEPS)
    assert kernels.count("gather") == kernels.count("list_candidates") == len(STEPS) - 1
    # Only the whole step has a schedule.
    assert builder.built == [False, True, False, True, False, False]
    assert builder.reorder_batch_threshold == 1


def test_a_graph_has_room_for_the_longest_context(gpu_backend, asked):
    _, _, builder = made(gpu_backend, asked, fraction=0.5)
    common, _ = Requests().step({"a": 1, "b": 1})
    first, then = (builder.build(0, common).spotlight.step().width for _ in range(2))
    assert first == LONGEST // 2 - 5, "the first step has something to search, or a capture would load its kernels"
    assert then == SIZE // 2 - 5  # half of a page, besides the ends
    assert builder.build_for_cudagraph_capture(common).spotlight.step().width == LONGEST // 2 - 5
    assert (builder._cudagraph_support, builder.supports_update_block_table) == ("uniform", False)


def test_a_capture_makes_its_own_step(gpu_backend, asked, monkeypatch):
    """A graph must contain what is computed from lengths and tables: one made before would keep old numbers."""
    batch = made(gpu_backend, asked)[2].build(0, Requests().step({"a": 1})[0]).spotlight
    eager = batch.step()
    assert batch.step() is eager
    monkeypatch.setattr("hashcore.cuda.launch.lane", lambda device: ("a stream", "a capture"))
    assert batch.step() is not eager
    assert batch.step() is batch.step()


@pytest.mark.parametrize("tokens_first", [False, True])
def test_pages_hold_codes_behind_keys_and_values(tokens_first):
    others, codes = SPEC.unpadded_page_size_bytes, 4 * WORDS * SIZE * HEADS
    cache = pool(replace(SPEC, page_size_padded=others + codes + 64), tokens_first=tokens_first)
    pages = pages_of(cache, WORDS)
    cache[3, 1, 5] = torch.arange(2 * DIM)
    pages.codes[:] = -1
    assert pages.k[3, 1, 5].tolist() == list(range(DIM))
    assert pages.v[3, 1, 5].tolist() == list(range(DIM, 2 * DIM))
    assert cache[3, 0].isnan().all()
    assert (pages.codes == -1).all()
    with pytest.raises(ValueError, match="must have room for codes after its keys and values"):
        pages_of(pool(replace(SPEC, page_size_padded=others + codes - 16)), WORDS)


def test_a_step_on_a_gpu_waits_for_nothing_and_its_launches_are_counted(gpu_backend, asked, monkeypatch):
    """Fake tensors on CUDA: the second sparse layer of a step of four rows."""
    config, spec, builder = made(gpu_backend, asked, layers=3, fraction=0.5)
    _, *sparse = impls(config)
    built(gpu_backend, config, [spec] * 3)
    monkeypatch.setattr("hashcore.cuda.launch.lane", lambda device: ("a stream",))
    monkeypatch.setattr(gpu_backend, "split_decodes_and_prefills", lambda *_, **__: (4, 0, 4, 0))
    with fake_gpu(), torch.inference_mode():
        zeros = functools.partial(torch.zeros, device="cuda")
        starts, slots = zeros(5, dtype=torch.int32), zeros(4, dtype=torch.int64)
        tables = zeros(4, LONGEST // SIZE, dtype=torch.int32)
        common = Common(starts, starts, zeros(4, dtype=torch.int32), 4, 4, 1, 200, tables, slots)
        q, k, v = (zeros(4, n, DIM, dtype=torch.bfloat16) for n in (QUERIES, HEADS, HEADS))
        metadata, out, caches = builder.build(0, common), torch.empty_like(q), [pool(spec, device="cuda") for _ in "12"]
        seen = []
        for _ in range(2):  # the first round moves the hasher's weights
            for impl, cache in zip(sparse, caches, strict=True):
                with Operators() as launching:
                    impl.do_kv_cache_update(None, k, v, cache, slots)
                    impl.forward(None, q, k, v, cache, metadata, out)
                seen.append(launching)
    names = [name for name in seen[3].launching if name not in ("clone", "contiguous")]
    assert names == ["hash_tokens", "place_codes", "hash_tokens", "search", "gather", "copy_"]
    assert not seen[3].copies + seen[3].on_host
    assert sparse[1].forwarded == []
