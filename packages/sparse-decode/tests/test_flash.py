"""The paper's set-up through flash-attn: against our own attention, on a double that has flash-attn's signatures."""

import sys

import flash_attn_double
import pytest
import torch
from sparse_decode import AttendingSelector, Budget, attach, attend, attend_reference
from sparse_decode.attention import flash
from sparse_decode_doubles import Calibrated, OwnAttention, PaperLikeHasher, SignHasher, generate, prompts, tiny_model
from transformers import StaticCache

TOLERANCE = 2e-2  # of bfloat16
BUDGET = Budget(0.1, min_tokens=2, sink=1, recent=2)


@pytest.fixture
def double(monkeypatch):
    return flash_attn_double.install(monkeypatch)


def case(sets, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sets)
    q = torch.randn(2, 6, 3, 16, generator=generator).to(dtype)
    k, v = torch.randn(2, 2, 2, 40, 16, generator=generator).to(dtype)
    counts = torch.randint(0, 8, (2, sets, 3, 1), generator=generator)
    best = torch.rand(2, sets, 3, 40, generator=generator).topk(7).indices.masked_fill(torch.arange(7) >= counts, 40)
    best = best.sort(-1).values
    return q, k, v, best.masked_fill(best == 40, -1)


def close(a, b):
    torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("sets", [2, 6])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_over_gathered_rows_equals_ours(double, sets, softcap, dtype):
    inputs = case(sets, dtype)
    out = flash.attend(*inputs, 0.3, softcap)
    assert out.dtype == dtype
    close(out, attend(*inputs, 0.3, softcap=softcap))
    assert (out == 0).all(-1).any(), "a row without a token"


def test_what_is_not_selected_is_not_read(double):
    q, k, v, indices = case(2)
    expected = flash.attend(q, k, v, indices, 0.3, None)
    unused = torch.ones(2, 2, 40, dtype=torch.bool)
    for b in range(2):
        for s in range(2):
            unused[b, s, indices[b, s][indices[b, s] >= 0]] = False
    unused[:, :, 0] = False  # what an unused slot holds
    poisoned = (x.masked_fill(unused[..., None], torch.nan) for x in (k, v))
    assert torch.equal(flash.attend(q, *poisoned, indices, 0.3, None), expected)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_dense_attention_is_causal(double, rows):
    q, k, v, _ = case(2)
    q = torch.randn(2, 6, rows, 16).bfloat16()
    indices = torch.arange(40).expand(2, 2, rows, 40)
    indices = indices.masked_fill(indices > torch.arange(40 - rows, 40)[:, None], -1)
    close(flash.dense(q, k, v, 0.3, None), attend_reference(q, k, v, indices, 0.3))


@pytest.mark.parametrize("selector", [SignHasher(), PaperLikeHasher()])
@pytest.mark.parametrize("start", ["decode", 0, 25])
def test_a_model_gives_what_it_gives_without(double, monkeypatch, selector, start):
    """Prefill in two chunks and steps: the same, and every attention went through flash-attn."""
    # Rounding to 16 bits would now and then change a selection: this double takes float32.
    monkeypatch.setattr(flash_attn_double, "DTYPES", [torch.float32])
    monkeypatch.setattr(flash, "DTYPES", (torch.float32,))
    model, (ids, _) = tiny_model(), prompts((40, 40))
    calls = {"flash_attn_func": 0, "flash_attn_with_kvcache": 0}

    def counted(name):
        function = getattr(flash_attn_double, name)

        def call(*arguments, **options):
            calls[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(double, name, call)

    for name in calls:
        counted(name)
    found = []
    for backend in ("gather", "flash"):
        with attach(model, selector, BUDGET, dense_layers=2, backend=backend, sparse_rows=start) as attachment:
            logits, cache = [], None
            for part in (ids[:, :20], ids[:, 20:37], ids[:, 37:38], ids[:, 38:39]):
                step = model(part, past_key_values=cache, use_cache=True)
                cache = step.past_key_values
                logits.append(step.logits)
            found.append((torch.cat(logits, 1), attachment.counts()))
        if backend == "gather":
            assert not any(calls.values())
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=1e-4)
    assert found[0][1] == found[1][1]
    assert all(calls.values())
    assert model.config._attn_implementation == "sdpa"


def test_generation(double):
    model, (ids, _) = tiny_model().to(torch.bfloat16), prompts((30,))
    with attach(model, SignHasher(), Budget(1.0), backend="flash") as attachment:
        tokens = generate(model, ids)
        assert set(attachment.density().values()) == {1.0}
    assert tokens.shape[1] > 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"family": "gemma2"}}, "needs a model whose layers all see the whole context, got layer 0"),
        ({"model": {"head_dim": 12}}, "needs heads of a multiple of 8 and at most 256, got 12"),
        ({"dtype": torch.float32}, "needs a model in bfloat16 or float16, got torch.float32"),
        ({"selector": Calibrated()}, "attach with remainder=False"),
        ({"selector": OwnAttention()}, "a selector with its own attention, got OwnAttention"),
        ({"options": {"kv": "host"}}, 'use kv="device"'),
        ({"options": {"backend": "flush"}}, 'backend must be "gather" or "flash", got \'flush\''),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),  # the same in every process
)
def test_what_is_refused_when_attaching(double, change, message):
    model = tiny_model(**change.get("model", {})).to(change.get("dtype", torch.bfloat16))
    options = {"backend": "flash", **change.get("options", {})}
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        attach(model, change.get("selector", SignHasher()), BUDGET, **options)
    assert model.config._attn_implementation == before


def test_without_the_package_or_a_gpu_it_is_refused(monkeypatch):
    model = tiny_model().to(torch.bfloat16)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"needs the package flash-attn, which is not installed; .*/packages/sparse-decode\[flash\]"
    ):
        attach(model, SignHasher(), BUDGET, backend="flash")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ValueError, match="needs a model on a CUDA device, got cpu"):
        attach(model, SignHasher(), BUDGET, backend="flash")


def test_what_is_refused_at_first_use(double):
    model, (ids, mask) = tiny_model().to(torch.bfloat16), prompts((30, 20))
    with attach(model, SignHasher(), BUDGET, dense_layers=2, backend="flash"):
        with pytest.raises(ValueError, match="not support masks or padding"):
            model(ids, attention_mask=mask)
        with pytest.raises(ValueError, match="needs a DynamicCache, got a layer of type StaticLayer"):
            model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=40))
    with pytest.raises(ValueError, match="not support learned sinks"):
        flash.refuse(None, torch.zeros(4), 0.0)


def test_own_attention_is_an_attending_selector():
    assert isinstance(OwnAttention(), AttendingSelector)
