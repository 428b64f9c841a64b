"""Models loaded with flash attention keep it for their dense calls; a double stands in for the library."""

import pytest
import torch
import torch.nn.functional as F
from sparse_decode import Budget, attach
from sparse_decode.model import FLASH
from sparse_decode_doubles import SignHasher, generate, prompts, tiny_model
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@pytest.fixture
def flash(monkeypatch):
    """A model that attends as if by flash-attn, and the number of rows of each of these calls."""
    calls = []

    def attend(module, q, k, v, mask, **options):
        assert module.config._attn_implementation == FLASH, "by this name transformers finds the library"
        rows, n = q.shape[2], k.shape[2]
        seen = torch.ones(rows, n, dtype=torch.bool).tril(n - rows)
        if mask is not None:
            assert mask.shape == (len(q), n), "flash-attn takes the mask of padding"
            seen = seen & mask[:, None, None].bool() | torch.eye(rows, n, dtype=torch.bool)[:, :n]
        calls.append(rows)
        out = F.scaled_dot_product_attention(
            q, k, v, seen.expand(len(q), 1, rows, n), scale=options["scaling"], enable_gqa=True
        )
        return out.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, FLASH, attend)
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, name, *_, **__: name)
    model = tiny_model()
    model.config._attn_implementation_internal = FLASH
    return model, calls


@pytest.mark.parametrize("lengths", [(40, 40), (40, 27)])
def test_prompts_and_dense_layers_go_by_flash_attention_and_steps_by_our_kernel(flash, lengths):
    model, calls = flash
    plain, (ids, mask) = tiny_model(), prompts(lengths)
    with attach(plain, SignHasher(), Budget(0.2), dense_layers=1):
        expected = generate(plain, ids, mask, new_tokens=6)
    with attach(model, SignHasher(), Budget(0.2), dense_layers=1) as attachment:
        assert torch.equal(generate(model, ids, mask, new_tokens=6), expected)
        assert attachment.density().keys() == {1, 2, 3}
    assert calls[:4] == [40] * 4, "the prompt"
    assert set(calls[4:]) <= {1}
    assert model.config._attn_implementation == FLASH
