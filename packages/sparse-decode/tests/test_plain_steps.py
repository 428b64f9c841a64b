"""Decode steps of one token without padding: what they take from the host, and from whom they take it."""

from types import SimpleNamespace

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import attach
from sparse_decode.attention.attend_torch import attend_reference
from sparse_decode.budget import LayerBudget
from sparse_decode.hashing import encode_cuda, hashers
from sparse_decode.hashing.hashers import QueryHeadHasher
from sparse_decode.layer.blocks import AttentionArgs, RowRule
from sparse_decode.layer.plan import LayerPlan
from sparse_decode.select import HashSelector, NoCodes, RecentSelector
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
)


class Pages(NoCodes):
    """Chooses whole pages, whoever asks for what: tokens that are read anyway among them, and an unused slot."""

    def select(self, rows):
        chosen = torch.tensor([0, 1, 2, 3, 96, 97, 98, 99, -1])
        return chosen.expand(rows.q.shape[0], rows.k.shape[1], 1, -1)


def inputs(tokens=100, **more):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 16, generator=draw) for heads, n in ((4, 1), (2, tokens), (2, tokens)))
    return AttentionArgs(q, k, v, None, None, None, 0.25, None, None, **more)


def test_a_selector_that_does_as_it_likes_reads_each_token_once():
    x = inputs()
    plan = LayerPlan(0, Pages(), LayerBudget(0.1, sink=2, recent=3), RowRule(None))
    out, _ = plan.attend(x)
    union = torch.tensor([0, 1, 2, 3, 96, 97, 98, 99]).expand(2, 2, 1, -1)
    torch.testing.assert_close(out, attend_reference(x.q, x.k, x.v, union, 0.25))
    assert plan.tally.totals() == (2 * 4 * 8, 2 * 4 * 100)


def test_what_a_hash_selects_is_counted_without_a_look():
    hasher = Hasher(HasherConfig("lsh", ModelShape(1, 4, 2, 16), bits=64), 0)
    selector, x = HashSelector(hasher), inputs()
    x = AttentionArgs(x.q, x.k, x.v, None, selector.encode_keys(0, x.k), None, 0.25, None, None)
    plan = LayerPlan(0, selector, LayerBudget(0.1, sink=2, recent=3), RowRule(None))
    plan.attend(x)
    assert plan.tally.totals() == (2 * 4 * 10, 2 * 4 * 100)


def test_what_one_mode_left_another_can_use():
    remainder = torch.rand(4, 6)
    plan = LayerPlan(0, RecentSelector(), LayerBudget(0.1), RowRule(None), remainder)
    with torch.inference_mode():
        first, _ = plan.attend(inputs())
    x = inputs()
    again, _ = plan.attend(AttentionArgs(x.q.requires_grad_(), x.k, x.v, None, None, None, 0.25, None, None))
    assert torch.equal(first, again.detach())


def test_two_steps_with_gradients_on():
    plan = LayerPlan(0, RecentSelector(), LayerBudget(0.1), RowRule(None), torch.rand(4, 6))
    from sparse_decode.unselected.remainder import RunningMoments

    moments, x = RunningMoments(), inputs(101)
    q, k, v = (y.requires_grad_() for y in (x.q, x.k, x.v))
    for tokens in (100, 101):
        step = AttentionArgs(q, k[:, :, :tokens], v[:, :, :tokens], None, None, None, 0.25, None, None, moments)
        out, _ = plan.attend(step)
    assert out.isfinite().all()


@pytest.mark.parametrize("budget", [LayerBudget(0.2), LayerBudget(0.2, dense_below=200)])
def test_eager_attention_that_adds_its_mask_unasked_gets_one(budget):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = ModernBertDecoderConfig(vocab_size=64, **sizes, max_position_embeddings=256, pad_token_id=0)
    model = ModernBertDecoderForCausalLM._from_config(config, attn_implementation="eager").eval()
    cache = DynamicCache(config=config)
    with torch.inference_mode(), attach(model, RecentSelector(), budget):
        model(torch.randint(1, 64, (1, 50)), past_key_values=cache)
        assert model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache).logits.isfinite().all()


@pytest.mark.parametrize("variant", ["transform", "lsh", "paper"])
@pytest.mark.parametrize("of", [HashSelector, lambda hasher: HashSelector(QueryHeadHasher(hasher))])
def test_a_step_that_hashes_keys_and_queries_at_once_is_one_that_hashes_them_apart(variant, of, monkeypatch):
    """As on a GPU, where one launch does it; here the operator runs on the CPU."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    hasher = Hasher(HasherConfig(variant, ModelShape.of(config), bits=64, hidden=64), 0)
    ids, mask = torch.randint(1, 64, (2, 46)), torch.ones(2, 46, dtype=torch.long)
    mask[0, :7] = 0
    found, calls = [], []

    def step(*given):
        calls.append(given)
        return encode_cuda.step(*given)

    for at_once in (False, True):
        cache = DynamicCache(config=config)
        if at_once:
            monkeypatch.setattr("sparse_decode.layer.calls.readable", lambda x: False)
            monkeypatch.setattr(encode_cuda, "supports", lambda layer, x: x.shape[2] == 1)
            monkeypatch.setattr(hashers, "encode_cuda", SimpleNamespace(**vars(encode_cuda) | {"step": step}))
        with torch.no_grad(), attach(model, of(hasher), LayerBudget(0.2)):
            logits = [model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache).logits]
            for i in range(40, 46):
                seen = mask[:, : i + 1]
                logits.append(model(ids[:, i : i + 1], attention_mask=seen, past_key_values=cache).logits)
            found.append((torch.cat(logits, 1), [layer.codes.clone() for layer in cache.layers]))
    assert len(calls) == 2 * 6
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    assert all(map(torch.equal, found[0][1], found[1][1]))
