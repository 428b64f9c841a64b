"""The remainder in attention: what it adds to a selection (docs/algorithm.md, eq. 15 and 16)."""

import copy

import pytest
import torch
from sparse_decode import Budget, attach
from sparse_decode.attach import attach_rows
from sparse_decode_doubles import Calibrated, SignHasher, generate, prompts, tiny_model


def test_the_remainder_changes_attention_and_can_be_left_out():
    model = tiny_model()
    ids, _ = prompts((40,))
    outs = []
    for hasher, wanted in ((Calibrated(), True), (Calibrated(), False), (SignHasher(), True)):
        with attach_rows(model, hasher, Budget(0.1), sparse_rows=0, remainder=wanted) as attachment:
            outs.append(model(ids).logits)
            assert attachment.remainder == (wanted and isinstance(hasher, Calibrated))
    assert torch.equal(outs[1], outs[2])
    assert not torch.allclose(outs[0], outs[1], atol=1e-3)


def test_a_whole_budget_is_dense():
    model = tiny_model()
    ids, mask = prompts()
    dense = generate(model, ids, mask)
    with attach(model, Calibrated(), Budget(1.0)):
        assert torch.equal(generate(model, ids, mask), dense)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_cached_steps_equal_one_pass_over_the_text(options):
    """Beams reorder the cache, prompt lookup crops it; a forward pass over the final text keeps no state at all."""
    model = tiny_model()
    ids, _ = prompts((33,))
    with attach_rows(model, Calibrated(), Budget(0.2), sparse_rows=33):
        text = generate(model, ids, new_tokens=12, **options)
    with attach_rows(model, Calibrated(), Budget(0.2), sparse_rows=33):
        logits = model(text, use_cache=False).logits
    if not options.get("num_beams"):
        assert torch.equal(logits[:, 32:-1].argmax(-1), text[:, 33:])
    with attach(model, Calibrated(), Budget(0.2)):
        first = model(text[:, :33], use_cache=True)
        steps = [model(text[:, [i]], past_key_values=first.past_key_values).logits for i in range(33, text.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), logits[:, 33:], atol=2e-4, rtol=2e-4)


def test_a_padded_row_equals_the_row_alone():
    model = tiny_model()
    ids, mask = prompts((40, 27))
    with attach(model, Calibrated(), Budget(0.2)):
        together = generate(model, ids, mask)
        alone = generate(model, ids[1:, 13:])
    assert torch.equal(together[1, 40:], alone[0, 27:])


def test_keys_and_values_on_the_host_give_the_same():
    model = tiny_model()
    ids, mask = prompts((40, 27))
    longer, found = torch.cat([mask, mask.new_ones(2, 1)], 1), {}
    for kv, remainder in (("device", True), ("host", True), ("host", False)):
        with attach(model, Calibrated(), Budget(0.2), kv=kv, remainder=remainder):
            past = model(ids, attention_mask=mask, use_cache=True).past_key_values
            step = model(ids[:, :1], attention_mask=longer, past_key_values=past)
            found[kv, remainder] = step.logits
    torch.testing.assert_close(found["host", True], found["device", True], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found["host", True], found["host", False], atol=1e-3), "the remainder changes something"


def test_a_copied_cache_goes_its_own_way():
    model = tiny_model()
    ids, _ = prompts((30,))
    with attach(model, Calibrated(), Budget(0.2)):
        past = model(ids[:, :20], use_cache=True).past_key_values
        model(ids[:, 20:21], past_key_values=past)
        twin = copy.deepcopy(past)
        one = model(ids[:, 21:22], past_key_values=past).logits
        model(ids[:, 25:26], past_key_values=twin)
        again = model(ids[:, 22:23], past_key_values=past).logits
    with attach_rows(model, Calibrated(), Budget(0.2), sparse_rows=20):
        expected = model(ids[:, :23], use_cache=False).logits
    torch.testing.assert_close(torch.cat([one, again], 1), expected[:, 21:], atol=2e-4, rtol=2e-4)


def test_a_mask_that_is_not_causal_is_refused():
    model = tiny_model()
    ids, _ = prompts((20,))
    mask = torch.tril(torch.ones(20, 20, dtype=torch.bool))[None, None].clone()
    mask[..., 10:, :5] = False  # two packed texts
    mask[..., 19, :] = True
    with (
        attach_rows(model, Calibrated(), Budget(0.2), sparse_rows=0),
        pytest.raises(ValueError, match="needs a causal mask"),
    ):
        model(ids, attention_mask=mask, use_cache=False)
