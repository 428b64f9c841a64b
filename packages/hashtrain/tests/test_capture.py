"""Captured queries and keys are what attention multiplies."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from hashtrain.capture import capture, capturing
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def test_capture_is_post_rope_q_and_k(model):
    ids = torch.arange(1, 41)[None]
    seen = {}
    with torch.no_grad(), capturing(model, lambda layer, q, k, s: seen.update({layer: (q, k, s)})):
        model(ids, use_cache=False)
        layer = model.model.layers[0]
        x = layer.input_layernorm(model.model.embed_tokens(ids))
        q = layer.self_attn.q_proj(x).view(1, 40, 4, 32).transpose(1, 2)
        k = layer.self_attn.k_proj(x).view(1, 40, 2, 32).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(x, torch.arange(40)[None]))
    assert sorted(seen) == [0, 1]
    torch.testing.assert_close(seen[0][0], q)
    torch.testing.assert_close(seen[0][1], k)
    assert seen[0][2] == pytest.approx(32**-0.5)


def test_capturing_changes_no_output_and_restores_the_model(model):
    ids = torch.arange(1, 41)[None]
    with torch.no_grad():
        before = model(ids).logits
        with capturing(model, lambda *a: None):
            inside = model(ids).logits
        with pytest.raises(RuntimeError), capturing(model, lambda *a: None):
            raise RuntimeError
        after = model(ids).logits
    assert torch.equal(before, inside)
    assert torch.equal(before, after)
    assert model.config._attn_implementation == "sdpa"


def test_stored_capture_reads_back(model, data):
    q, k, scaling = data.read(2, 1)
    assert q.dtype == k.dtype == torch.bfloat16
    assert q.shape == (1, 4, 512, 32)
    assert k.shape == (1, 2, 512, 32)
    assert scaling == 32**-0.5
    assert len(data) == 3


def test_a_full_disk_is_refused_before_anything_is_written(model, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="not enough free disk"):
        capture(model, [torch.arange(64)], tmp_path / "new")
    assert not (tmp_path / "new").exists()
