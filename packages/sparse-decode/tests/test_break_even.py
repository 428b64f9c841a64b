"""Dense below the break-even length, row by row; where that length is given, and where it is measured."""

import math

import pytest
import torch
from sparse_decode import Budget, OracleSelector, attach
from sparse_decode.costs import break_even as module
from sparse_decode_doubles import Auditor, SignHasher, generate, prompts, tiny_model
from transformers import DynamicCache

EDGE = 38
BUDGET = Budget(0.1, min_tokens=2, sink=1, recent=2, dense_below=EDGE)


def test_a_row_is_dense_until_it_sees_enough(monkeypatch):
    model, lengths = tiny_model(), (40, 27, 33)
    ids, mask = prompts(lengths)
    auditor = Auditor(monkeypatch)
    with attach(model, SignHasher(), BUDGET) as attachment:
        together = generate(model, ids, mask, new_tokens=12)
        batched = attachment.counts()
        for visible, selected in auditor.sizes:
            short = (visible < EDGE).expand_as(selected)
            assert torch.equal(selected[short], visible.expand_as(selected)[short])
            assert (selected < 0.4 * visible)[~short].all()
        attachment.reset_density()
        for row, length in enumerate(lengths):
            alone = generate(model, ids[row : row + 1, 40 - length :], new_tokens=12)
            assert torch.equal(alone[0], together[row, 40 - length :])
        assert attachment.counts() == batched


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_call_of_short_rows_is_dense_and_counted(family):
    model, (ids, mask) = tiny_model(family), prompts((20, 9))

    def run():
        cache = DynamicCache(config=model.config)
        model(ids[:, :-3], attention_mask=mask[:, :-3], past_key_values=cache)
        return model(ids[:, -3:-2], attention_mask=mask[:, :-2], past_key_values=cache).logits

    dense = run()
    with attach(model, SignHasher(), BUDGET) as attachment:
        torch.testing.assert_close(run(), dense, atol=1e-4, rtol=1e-4)
        assert attachment.counts() == dict.fromkeys(attachment.layers, (4 * (18 + 7), 4 * (18 + 7)))
        assert attachment.density() == dict.fromkeys(attachment.layers, 1.0)


def test_layers_may_have_budgets_of_their_own():
    model, (ids, mask) = tiny_model(), prompts((40, 27))
    budgets = {1: Budget(0.5), 3: Budget(1.0, dense_below=100)}
    with attach(
        model, OracleSelector(), Budget(0.1, sink=0, recent=0), layer_budgets=budgets, dense_layers=1
    ) as attachment:
        generate(model, ids, mask, new_tokens=3)
        seen = [40 + 1, 40 + 2, 27 + 1, 27 + 2]
        assert attachment.counts() == {
            1: (4 * sum(n // 2 for n in seen), 4 * sum(seen)),
            2: (4 * sum(n // 10 for n in seen), 4 * sum(seen)),
            3: (4 * sum(seen), 4 * sum(seen)),
        }


def test_a_budget_by_layer_follows_the_hashers_shares_at_the_same_total():
    model, (ids, mask) = tiny_model(), prompts((100,))
    hasher = SignHasher()
    hasher.layer_shares = (9.0, 0.5, 1.0, 1.5)  # layer 0 is dense: the mean of the others counts
    with attach(model, hasher, Budget(0.1, sink=0, recent=0, by_layer=True), dense_layers=1) as attachment:
        generate(model, ids, mask, new_tokens=3)
        seen = [101, 102]
        assert {layer: read for layer, (read, _) in attachment.counts().items()} == {
            layer: 4 * sum(math.floor(n * 0.1 * share) for n in seen) for layer, share in ((1, 0.5), (2, 1), (3, 1.5))
        }
    own = {3: Budget(0.2, sink=0, recent=0)}
    with attach(model, hasher, Budget(0.4, sink=0, recent=0, by_layer=True), layer_budgets=own) as attachment:
        generate(model, ids, mask, new_tokens=2)
        found = {layer: read / 4 for layer, (read, _) in attachment.counts().items()}
    assert found == {0: 101, 1: math.floor(101 * 0.4 * 0.5 / 3), 2: math.floor(101 * 0.4 / 3), 3: 20}


def test_a_budget_by_layer_needs_shares():
    for selector in (SignHasher(), OracleSelector()):
        with pytest.raises(ValueError, match="needs a hasher with layer_shares, which `hashtrain` measures, got none"):
            attach(tiny_model(), selector, Budget(by_layer=True))
    with pytest.raises(ValueError, match="by_layer must be true or false, got 1"):
        Budget(by_layer=1)


def test_a_budget_for_a_layer_that_is_not_sparse_is_refused():
    with pytest.raises(ValueError, match=r"must name sparse layers, \[2, 3\], got \[0, 7\]"):
        attach(tiny_model(), SignHasher(), dense_layers=2, layer_budgets={0: Budget(), 7: Budget(), 2: Budget()})


@pytest.mark.parametrize(("crossing", "expected"), [(2048, 2048), (256, 256), (1 << 30, 2 * module.LENGTHS[-1])])
def test_the_measured_break_even_is_the_first_context_at_which_sparse_is_no_slower(crossing, expected, monkeypatch):
    clock = {"sparse": lambda n: crossing, "dense": lambda n: n}  # a sparse step takes as long at any context
    monkeypatch.setattr(module, "_steps", lambda plan_of, plan, heads, n, *_: [(kind, n) for kind in clock])
    monkeypatch.setattr(module, "_seconds", lambda step, device: clock[step[0]](step[1]))
    with attach(tiny_model(), SignHasher(), Budget(dense_below="measured")) as attachment:
        assert attachment.break_even == expected
        assert attachment._plans[2].budget.dense_below == expected


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_the_break_even_is_measured_on_the_models_own_steps(family, monkeypatch):
    monkeypatch.setattr(module, "LENGTHS", (256, 512))
    monkeypatch.setattr(module, "_REPEATS", 1)
    model = tiny_model(family)
    with attach(model, SignHasher(), layer_budgets={3: Budget(dense_below="measured")}) as attachment:
        assert attachment.break_even in (256, 512, 1024)
        assert attachment._plans[3].budget.dense_below == attachment.break_even
        assert attachment.counts() == {}
    assert attach(model, SignHasher(), Budget()).break_even is None


def test_contexts_that_would_take_too_much_memory_are_not_tried(monkeypatch):
    monkeypatch.setattr(module, "_MAX_BYTES", 2 * 2 * 16 * 4 * 300)
    monkeypatch.setattr(module, "_seconds", lambda step, device: -1.0 if step.__name__ == "<lambda>" else 0.0)
    with attach(tiny_model(), SignHasher(), Budget(dense_below="measured")) as attachment:
        assert attachment.break_even == 512


def test_by_default_a_step_is_dense_until_the_bytes_that_it_saves_are_worth_it(monkeypatch):
    """Keys and values of 256 bytes a token, codes of 16 a head; 2 % is read at half the speed."""
    model, (ids, mask) = tiny_model(), prompts((40,))
    monkeypatch.setattr(module, "EARNS", 38 * (256 - 32 - 2 * 0.02 * 256) + 1)
    with attach(model, SignHasher()) as attachment:
        assert attachment.break_even == 39
        generate(model, ids[:, :30], mask[:, :30], new_tokens=9)
        assert attachment.density() == dict.fromkeys(attachment.layers, 1.0), "the last step sees 38"
        generate(model, ids[:, :38], mask[:, :38], new_tokens=2)
        assert attachment.counts() == dict.fromkeys(
            attachment.layers, (4 * (sum(range(31, 39)) + 5), 4 * sum(range(31, 40)))
        )


@pytest.mark.parametrize("options", [{"sparse_rows": 5}, {"kv": "host"}, {"budget": Budget()}])
def test_no_break_even_where_a_length_is_given_or_nothing_is_known_of_bytes(options):
    model = tiny_model()
    with attach(model, SignHasher(), **options) as attachment:
        assert attachment.break_even is None
        assert attachment._plans[3].budget.dense_below == 0
    with attach(model, OracleSelector()) as attachment:
        assert attachment.break_even is None


def test_a_step_that_saves_no_bytes_is_never_sparse():
    with attach(tiny_model(), SignHasher(), Budget(0.6, dense_below="predicted")) as attachment:
        assert attachment.break_even == module.NEVER


def test_steps_on_a_gpu_are_timed_with_what_they_launched(monkeypatch):
    """Once warmed up, and in every repeat, the device is waited for behind the step."""
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    module._seconds(lambda: done.append("step"), torch.device("cuda"))
    assert done == ["step", "wait"] * (1 + module._REPEATS)
    done.clear()
    module._seconds(lambda: done.append("step"), torch.device("cpu"))
    assert "wait" not in done
