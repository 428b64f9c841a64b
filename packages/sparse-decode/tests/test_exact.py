"""Exact mode: whatever is drafted, `generate` makes what the model makes by itself."""

import threading

import pytest
import torch
from sparse_decode import Budget
from sparse_decode.generation import exact, exact_refusals
from sparse_decode.unselected.sums import Moments
from sparse_decode_doubles import QUICK, UNUSUAL, Calibrated, SignHasher, generate, prompts, slow_but, tiny_model
from sparse_decode_exact import POOR, attached, prompt
from transformers import DynamicCache, TextStreamer


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", slow_but(QUICK, UNUSUAL))
def test_greedy_text_is_the_dense_one(family):
    model, ids, found = tiny_model(family), prompt(), []
    if not exact_refusals.SLIDES and "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        pytest.skip("sliding layers of transformers before 5.19 are refused")
    dense, plain = generate(model, ids, new_tokens=40), type(model)
    for drafted, fraction in ((1, 0.3), (4, 0.3), (7, 0.03)):
        with attached(model, drafted, budget=Budget(fraction)) as attachment:
            assert torch.equal(generate(model, ids, new_tokens=40), dense)
            found.append(attachment.drafts.acceptance)
            assert all(share < fraction + 0.1 for share in attachment.density().values()), "drafts are sparse"
        assert type(model) is plain
    _, given, accepted = (sum(column) for column in zip(*found, strict=True))
    assert 0 < accepted < given, "too easy or too hard a case to tell"


@pytest.mark.parametrize("hasher", [SignHasher(), Calibrated()])
@pytest.mark.parametrize("padding", [0, 9])
def test_padding_on_the_left_and_the_remainder(padding, hasher):
    model = tiny_model(layer_types=None)
    ids, mask = (x[:1] for x in prompts((40 - padding, 40)))
    dense = generate(model, ids, mask, new_tokens=30)
    with attached(model, 3, hasher):
        cache = DynamicCache(config=model.config)
        assert torch.equal(generate(model, ids, mask, new_tokens=30, past_key_values=cache), dense)
        if isinstance(hasher, Calibrated):
            held = cache.layers[2]
            k, v, n = held.keys, held.values, held.moments.length
            assert n > 60, "the sums follow the text"
            seen = None if not padding else torch.arange(n)[None] >= padding
            for found, right in zip(held.moments._sums, Moments.of(k, v, seen, 0, n, k.device), strict=True):
                torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


def test_a_check_is_one_dense_pass_over_all_drafted_tokens_and_a_draft_is_one_row(monkeypatch):
    model, rows = tiny_model(), {True: [], False: []}
    original = model.forward

    def forward(ids, *given, **named):
        rows[hasattr(named["past_key_values"], exact.MARK)].append(ids.shape[1])
        return original(ids, *given, **named)

    with attached(model, 3, budget=Budget(1.0)):
        monkeypatch.setattr(model, "forward", lambda *given, input_ids, **named: forward(input_ids, *given, **named))
        generate(model, prompt(), new_tokens=9)
    assert rows[False] == [40, 4, 4], "the prompt, and two checks of the last token and three drafted ones"
    assert rows[True] == [1] * 6


def logits_of(model, ids):
    """All tokens but the last in one call, the last in another."""
    cache = DynamicCache(config=model.config)
    first = model(ids[:, :-1], past_key_values=cache).logits
    return torch.cat([first, model(ids[:, -1:], past_key_values=cache).logits], 1)


def test_every_other_call_of_the_model_is_dense():
    model, ids = tiny_model(), prompt()
    dense = logits_of(model, ids)
    with attached(model) as attachment:
        assert torch.equal(logits_of(model, ids), dense)
        assert not attachment.counts()
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        with attachment.drafts.adding(cache):
            assert not torch.equal(model(ids[:, -1:], past_key_values=cache).logits, dense[:, -1:])
        assert cache.get_seq_length() == 40, "drafts are forgotten"


@pytest.mark.parametrize("tokens", [1, 2, 5, 6])
def test_length_ends_a_text_where_it_ends_the_dense_one(tokens):
    model, ids = tiny_model(), prompt()
    dense = generate(model, ids, new_tokens=tokens)
    with attached(model):
        assert torch.equal(generate(model, ids, new_tokens=tokens), dense)


@pytest.mark.sample(8)
@pytest.mark.parametrize("budget", [POOR, Budget(1.0)])
@pytest.mark.parametrize("at", range(1, 12))
def test_any_stop_criterion_and_the_end_token_stop_where_they_stop_the_dense_text(at, budget):
    model, ids = tiny_model(), prompt()
    text = generate(model, ids, new_tokens=20)[0, 40:]
    ends = {"eos_token_id": int(text[at])}
    two = {"stopping_criteria": [lambda ids, _, **__: (ids[:, -2:] == text[at - 1 : at + 1]).all(-1)]}
    for how in (ends, two):
        dense = generate(model, ids, new_tokens=20, **how)
        assert dense.shape[1] <= 41 + at
        with attached(model, 4, budget=budget):
            assert torch.equal(generate(model, ids, new_tokens=20, **how), dense)


class Words(TextStreamer):
    def __init__(self):
        self.tokens, self.puts, self.ended = [], 0, False

    def put(self, value):
        assert value.ndim == 2 or not self.puts or len(value) == 1
        self.tokens += value.flatten().tolist()
        self.puts += 1

    def end(self):
        self.ended = True


def test_a_streamer_gets_every_token_once():
    model, ids, words = tiny_model(), prompt(), Words()
    with attached(model, 4, budget=Budget(1.0)):
        made = generate(model, ids, new_tokens=20, streamer=words)
    assert words.tokens == made[0].tolist()
    assert words.ended
    assert words.puts < 20, "several at once"


def test_scores_and_logits_are_those_of_the_dense_text():
    model, ids = tiny_model(), prompt()
    how = {"new_tokens": 12, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    dense = generate(model, ids, **how)
    with attached(model):
        found = generate(model, ids, **how)
    assert len(found.scores) == len(found.logits) == 12
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(dense.logits), atol=1e-4, rtol=1e-4)


def test_processors_of_logits_see_the_drafted_text():
    model, ids = tiny_model(), prompt()
    how = {"new_tokens": 24, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3}
    dense = generate(model, ids, **how)
    assert not torch.equal(dense, generate(model, ids, new_tokens=24))
    with attached(model):
        assert torch.equal(generate(model, ids, **how), dense)


def test_a_text_goes_on_behind_a_cache():
    model, ids = tiny_model(), prompt()
    dense, cache = generate(model, ids, new_tokens=20), DynamicCache(config=model.config)
    model(ids[:, :25], past_key_values=cache)
    with attached(model):
        assert torch.equal(generate(model, ids, new_tokens=9, past_key_values=cache), dense[:, :49])
        assert torch.equal(generate(model, dense[:, :49], new_tokens=11, past_key_values=cache), dense)
        with pytest.raises(ValueError, match="pass the whole sequence"):
            generate(model, dense[:, 59:60], torch.ones(1, 60), new_tokens=2, past_key_values=cache)


@pytest.mark.slow
def test_threads_draft_each_for_itself():
    model = tiny_model()
    texts = [prompt(40, seed) for seed in range(4)]
    dense, found = [generate(model, ids, new_tokens=30) for ids in texts], {}

    @torch.no_grad()
    def write(i):
        found[i] = generate(model, texts[i], new_tokens=30)

    with attached(model) as attachment:
        threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert attachment.drafts.acceptance.drafted > 4 * 30
    assert all(torch.equal(found[i], dense[i]) for i in range(4))


def test_a_model_saved_while_attached_is_a_plain_one(tmp_path):
    model = tiny_model()
    with attached(model):
        model.save_pretrained(tmp_path)
    assert '"LlamaForCausalLM"' in (tmp_path / "config.json").read_text()


def test_sums_are_not_lost_when_drafts_are_forgotten():
    """`advance` alone would sum the prompt anew in each round."""
    model, ids = tiny_model(), prompt()
    cache, summed = DynamicCache(config=model.config), []
    original = Moments.of.__func__

    with attached(model, 3, Calibrated()) as attachment, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Moments, "of", classmethod(lambda cls, *a: (summed.append(a[4] - a[3]), original(cls, *a))[1]))
        generate(model, ids, new_tokens=20, past_key_values=cache)
        assert sum(n >= 40 for n in summed) == 4, "the prompt once in each layer"
        assert attachment.drafts.acceptance.checks > 3
