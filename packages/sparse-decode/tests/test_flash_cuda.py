"""The paper's set-up through flash-attn on a GPU, against the CPU. Skipped without either."""

import flash_attn_double
import pytest
import torch
from sparse_decode import Budget, attach, attend
from sparse_decode.attention import flash
from sparse_decode_doubles import SignHasher, prompts, tiny_model

pytest.importorskip("flash_attn", reason="flash-attn is the extra sparse-decode[flash]; test_flash.py has a double")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; test_flash.py runs on the CPU"),
]
CLOSE = {"atol": 2e-2, "rtol": 1e-2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("width", [1, 600])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_equals_the_cpu(dtype, group, width, softcap):
    generator = torch.Generator().manual_seed(width)
    q = torch.randn(2, 2 * group, 2, 128, generator=generator).to(dtype)
    k, v = torch.randn(2, 2, 2, 3000, 128, generator=generator).to(dtype)
    best = torch.rand(2, 2, 2, 3000, generator=generator).topk(width).indices.sort(-1).values
    counts = torch.tensor([0, width // 2, width, width]).view(2, 1, 2, 1)
    indices = best.masked_fill(torch.arange(width) >= counts, -1)
    found = flash.attend(*(x.cuda() for x in (q, k, v, indices)), 0.1, softcap).cpu()
    torch.testing.assert_close(found, attend(q, k, v, indices, 0.1, softcap=softcap), **CLOSE)


@pytest.mark.parametrize("rows", [1, 300])
def test_dense_calls_equal_the_double(rows):
    q = torch.randn(2, 14, rows, 64).bfloat16()
    k, v = torch.randn(2, 2, 2, 1000, 64).bfloat16()
    by_token = (x.transpose(1, 2) for x in (q, k, v))
    expected = flash_attn_double.flash_attn_func(*by_token, softmax_scale=0.1, causal=True)
    torch.testing.assert_close(flash.dense(q.cuda(), k.cuda(), v.cuda(), 0.1, None).cpu(), expected, **CLOSE)


def test_a_model_decodes():
    model, (ids, _) = tiny_model().to("cuda", torch.bfloat16), prompts((40,))
    logits = []
    for options in ({}, {"backend": "flash"}):
        with attach(model, SignHasher(), Budget(1.0), **options):
            cache = model(ids[:, :30].cuda(), use_cache=True).past_key_values
            logits.append(model(ids[:, 30:31].cuda(), past_key_values=cache).logits)
    torch.testing.assert_close(*logits, atol=5e-2, rtol=5e-2)
