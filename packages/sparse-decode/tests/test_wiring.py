"""The hashers of hashtrain in this package: every variant, both kinds of selection, a foreign one refused."""

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Budget, HashSelector, KeyQueryHasher, QueryHeadHasher, attach
from sparse_decode.attach import attach_rows
from sparse_decode_doubles import Auditor, generate, prompts, tiny_model


def hasher_for(model, variant="planes", bits=128):
    return Hasher(HasherConfig(variant, ModelShape.of(model.config), bits=bits))


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("variant", ["lsh", "paper", "planes"])
def test_every_variant_generates_and_scores(variant, per_query_head, monkeypatch):
    model, (ids, mask) = tiny_model("qwen3"), prompts()
    hasher = hasher_for(model, variant)
    selector = QueryHeadHasher(hasher) if per_query_head else hasher
    auditor = Auditor(monkeypatch)
    with attach(model, selector, Budget(0.1)) as attachment:
        generate(model, ids, mask, new_tokens=4)
    assert auditor.steps == 12
    assert attachment.counts()[2][1] == 4 * sum(n + step for n in (40, 27, 33) for step in (1, 2, 3))
    with attach_rows(model, selector, Budget(0.1), sparse_rows=0):
        assert model(ids[:1]).logits.isfinite().all()


def test_hashers_keep_the_protocol():
    model = tiny_model()
    assert isinstance(hasher_for(model), KeyQueryHasher)
    assert isinstance(QueryHeadHasher(hasher_for(model)), KeyQueryHasher)


@pytest.mark.parametrize("wrap", [lambda h: h, HashSelector, QueryHeadHasher])
@pytest.mark.parametrize(
    ("change", "fact"), [({"num_key_value_heads": 4}, "KV heads"), ({"num_hidden_layers": 3}, "layers")]
)
def test_a_hasher_of_another_model_is_refused(change, fact, wrap):
    other = hasher_for(tiny_model(**change))
    model, (ids, _) = tiny_model(), prompts((9,))
    dense = model(ids).logits
    with pytest.raises(ValueError, match=f"belongs to another model .*expected {fact}"):
        attach_rows(model, wrap(other), sparse_rows=0)
    assert torch.equal(model(ids).logits, dense)
