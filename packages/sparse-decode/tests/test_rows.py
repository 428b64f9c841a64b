"""The evaluation rule: one forward pass scores a text as decoding it token by token would."""

from dataclasses import replace

import pytest
import torch
from sparse_decode import Attachment, Budget, HashSelector, OracleSelector, RecentSelector, attach, attend_reference
from sparse_decode_doubles import UNUSUAL, Auditor, Calibrated, PaperLikeHasher, SignHasher, prompts, tiny_model
from transformers import DynamicCache

BUDGET = Budget(0.1, min_tokens=2, sink=0, recent=0)
LENGTH, TOLERANCE = 40, 1e-5


def token_by_token(model, ids, prefill):
    """Dense prefill of some tokens, then one at a time: logits [B, T, vocabulary]."""
    cache, logits = DynamicCache(config=model.config), []
    for first, last in [(0, prefill)] * bool(prefill) + [(t, t + 1) for t in range(prefill, ids.shape[1])]:
        logits.append(model(ids[:, first:last], past_key_values=cache).logits)
    return torch.cat(logits, 1)


def close(a, b):
    torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "start"), [*((x, 0) for x in UNUSUAL), ("llama", 25), ("gemma2", LENGTH - 1)])
def test_one_pass_equals_token_by_token(family, start, monkeypatch):
    model, (ids, _) = tiny_model(family), prompts((LENGTH, LENGTH))
    dense = model(ids).logits
    with attach(model, SignHasher(), BUDGET):
        decoded = token_by_token(model, ids, start)
    Auditor(monkeypatch)
    with Attachment(model, SignHasher(), BUDGET, sparse_rows=start):
        close(model(ids).logits, decoded)
        close(model(ids, use_cache=False).logits, decoded)
        close(token_by_token(model, ids, 0), decoded)
        close(token_by_token(model, ids, 17), decoded)
    close(decoded[:, :start], dense[:, :start])
    assert (decoded[:, start:] - dense[:, start:]).abs().max() > 100 * TOLERANCE


WHAT = [PaperLikeHasher(), OracleSelector(), OracleSelector(True), RecentSelector()]


@pytest.mark.parametrize(("selector", "implementation"), [*((x, "sdpa") for x in WHAT), (PaperLikeHasher(), "eager")])
def test_every_selector_and_dense_implementation(selector, implementation):
    model, (ids, _) = tiny_model(implementation=implementation), prompts((LENGTH, LENGTH))
    budget = Budget(0.1, min_tokens=2, sink=1, recent=2)
    with attach(model, selector, budget):
        decoded = token_by_token(model, ids, 9)
    with Attachment(model, selector, budget, sparse_rows=9):
        close(model(ids).logits, decoded)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "granite"])
def test_the_oracle_knows_the_models_own_logits(family, monkeypatch):
    model, (ids, _) = tiny_model(family), prompts((LENGTH, LENGTH))
    selector, seen = OracleSelector(), []
    select = selector.select
    monkeypatch.setattr(selector, "select", lambda rows: (seen.append(rows), select(rows))[1])
    with attach(model, selector, BUDGET):
        decoded = token_by_token(model, ids, 9)
    with Attachment(model, selector, BUDGET, sparse_rows=9):
        close(model(ids).logits, decoded)
    facts = {"gemma2": (0.2, False, 0.25), "gpt_oss": (None, True, 0.25), "granite": (None, False, 0.2)}[family]
    assert {(rows.softcap, rows.sinks is not None, rows.scaling) for rows in seen} == {facts}


@pytest.mark.parametrize("budget", [BUDGET, Budget(0.05, sink=2, recent=1)])
def test_a_padded_row_is_the_row_alone(budget):
    model, lengths = tiny_model(), (40, 27, 5)
    ids, mask = prompts(lengths)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with Attachment(model, SignHasher(), budget, sparse_rows=0):
        together = model(ids, attention_mask=mask, position_ids=positions).logits
        for row, length in enumerate(lengths):
            close(model(ids[row : row + 1, 40 - length :]).logits[0], together[row, 40 - length :])


def test_memory_of_a_long_pass_is_bounded(monkeypatch):
    """No more scores at once than the limit, whatever the context."""
    model, (ids, _) = tiny_model(max_position_embeddings=2048), prompts((1500,))
    seen = []
    select = HashSelector.select
    monkeypatch.setattr("sparse_decode.step.ROWS_AT_ONCE", 32)
    monkeypatch.setattr(HashSelector, "select", lambda own, rows: (seen.append(rows.q.shape), select(own, rows))[1])
    with Attachment(model, SignHasher(), Budget(0.01), dense_layers=3, sparse_rows=1400):
        model(ids)
    assert {shape[2] for shape in seen} <= {32, 100 % 32}
    assert len(seen) == 4  # dense rows are not among them


class Weighing(RecentSelector):
    """Has an attention of its own, `factor` times the ordinary one."""

    def __init__(self, factor):
        self.factor = factor

    def attend(self, rows, v, indices):
        return self.factor * attend_reference(rows.q, rows.k, v, indices, rows.scaling)


@pytest.mark.parametrize("start", [0, 25])
def test_a_selector_may_bring_its_own_attention(start):
    model, (ids, _) = tiny_model(), prompts((LENGTH, LENGTH))

    def logits(selector):
        with Attachment(model, selector, Budget(0.1, sink=0, recent=0), sparse_rows=start) as attachment:
            return model(ids).logits, attachment.counts()

    plain, counts = logits(RecentSelector())
    close(logits(Weighing(1.0))[0], plain)
    assert logits(Weighing(1.0))[1] == counts
    halved = logits(Weighing(0.5))[0]
    close(halved[:, :start], plain[:, :start])
    assert (halved[:, start:] - plain[:, start:]).abs().amax((0, 2)).min() > 100 * TOLERANCE


class WeighingHashes(HashSelector):
    """Selects by calibrated codes, and has an attention of its own."""

    def attend(self, rows, v, indices):
        return attend_reference(rows.q, rows.k, v, indices, rows.scaling)


def test_an_attention_of_its_own_has_no_remainder():
    """The remainder's coefficients know the logits of ordinary attention only: refused, and the model is as it was."""
    model, (ids, _) = tiny_model(), prompts((LENGTH,))
    dense = model(ids).logits
    with pytest.raises(ValueError, match=r"got WeighingHashes, which has .*; attach with remainder=False"):
        attach(model, WeighingHashes(Calibrated()), BUDGET)
    assert torch.equal(model(ids).logits, dense)
    logits = []
    alike = replace(BUDGET, sink=0, recent=0)  # which an attention of its own is to read itself
    for selector in (WeighingHashes(Calibrated()), HashSelector(Calibrated())):
        with Attachment(model, selector, alike, sparse_rows=0, remainder=False) as attachment:
            logits.append(model(ids).logits)
            assert not attachment.remainder
    close(*logits)
