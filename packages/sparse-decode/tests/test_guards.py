"""Each guard of a law is needed: the law holds, and fails when the guard is taken away."""

import sys

import pytest
import torch
from sparse_decode import Budget, attach
from sparse_decode.attach import attach_rows
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.model import NAMES
from sparse_decode.step import RowRule, SparseLayer
from sparse_decode.sums import Sums
from sparse_decode_doubles import VOCABULARY, Auditor, Calibrated, SignHasher, generate, prompts, tiny_model
from transformers import AttentionMaskInterface, DynamicCache, StaticCache

TENTH = Budget(0.1, min_tokens=2, sink=0, recent=0)


def padded(lengths):
    """A batch whose padding holds words: padding tokens have keys of zero, which nothing would select."""
    ids, mask = prompts(lengths)
    words = torch.randint(3, VOCABULARY, ids.shape, generator=torch.Generator().manual_seed(8))
    return torch.where(mask.bool(), ids, words), mask


def poisoned_padding(monkeypatch):
    """Keys and values that no row sees or selected, and those of padding, may be NaN."""
    model, (ids, mask) = tiny_model(), padded((40, 22, 33))
    auditor = Auditor(monkeypatch)
    with attach(model, SignHasher(), TENTH):
        generate(model, ids, mask, new_tokens=4)
    assert auditor.padded == auditor.steps == 12


def padded_is_alone(monkeypatch):
    """A padded row gives the tokens of the row alone."""
    model, (ids, mask) = tiny_model(), padded((40, 22))
    with attach(model, Calibrated(), TENTH):
        together, alone = generate(model, ids, mask), generate(model, ids[1:, 18:])
    assert torch.equal(together[1, 40:], alone[0, 22:])


def split_is_whole(monkeypatch):
    """A prefill in chunks is the whole prefill, in a padded batch too."""
    model, (ids, mask) = tiny_model(), padded((40, 27))
    with attach_rows(model, SignHasher(), TENTH, sparse_rows=24):
        logits = generate(model, ids, mask, new_tokens=1, output_logits=True, return_dict_in_generate=True).logits
        options = {"prefill_chunk_size": 7, "output_logits": True, "return_dict_in_generate": True}
        split = generate(model, ids, mask, new_tokens=1, **options).logits
    torch.testing.assert_close(split[0], logits[0], atol=1e-4, rtol=1e-4)


def static_is_dynamic(monkeypatch):
    """A static cache gives the logits of a dynamic one, step by step.

    They round the remainder's covariance after different tokens: 3e-4 of a logit.
    """
    model, (ids, _) = tiny_model(), prompts((20,))
    with attach(model, Calibrated(), Budget(0.3, min_tokens=2), dense_layers=0):
        dynamic, static = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)
        for t in range(20):
            token = ids[:, t : t + 1]
            one, other = (model(token, past_key_values=held).logits for held in (dynamic, static))
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def selector_sees_everything(monkeypatch):
    original = SparseLayer._block

    def blind(whose, q, interval, whole):
        return original(whose, q, interval * torch.tensor([0, 1]), whole)

    monkeypatch.setattr(SparseLayer, "_block", blind)


def no_mask(monkeypatch):
    """Hugging Face builds no mask for an attention whose mask it does not know."""
    monkeypatch.setattr(sys.modules["sparse_decode.attach"], "register", lambda: None)
    for name in NAMES.values():
        monkeypatch.delitem(AttentionMaskInterface._global_mapping, name)


def means_with_padding(monkeypatch):
    advance = Sums.advance
    monkeypatch.setattr(Sums, "advance", lambda sums, k, v, starts, *more: advance(sums, k, v, None, *more))
    monkeypatch.setattr(Sums, "covers", lambda *_: False)


def whole_calls_are_prefill(monkeypatch):
    monkeypatch.setattr(RowRule, "first_sparse", lambda rule, rows, n: 0 if rows < n else rows)
    monkeypatch.setattr(RowRule, "all_below", property(lambda rule: 0))


def codes_of_a_static_cache(monkeypatch):
    monkeypatch.setattr(Encoder, "write", lambda *arguments: None)


CASES = [
    (poisoned_padding, selector_sees_everything),
    (poisoned_padding, no_mask),
    (padded_is_alone, selector_sees_everything),
    (padded_is_alone, no_mask),
    (padded_is_alone, means_with_padding),
    (split_is_whole, whole_calls_are_prefill),
    (static_is_dynamic, codes_of_a_static_cache),
]


@pytest.mark.parametrize("law", sorted({law for law, _ in CASES}, key=lambda law: law.__name__))
def test_the_law_holds(law, monkeypatch):
    law(monkeypatch)


@pytest.mark.parametrize(("law", "guard"), CASES)
def test_the_law_fails_without(law, guard, monkeypatch):
    guard(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        law(monkeypatch)
