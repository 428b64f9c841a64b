"""A sequence with numbers that are not finite: the others of its batch are what they are without it, to the bit.

What it reads that is not finite makes its own rows NaN, as in dense attention; tokens that it does not read do not.
"""

import pytest
import torch
from sparse_decode import Attachment, Budget, HashSelector, LshSelector, OracleSelector, RecentSelector
from sparse_decode_doubles import SignHasher, hasher_for, prompts, tiny_model
from transformers import DynamicCache, StaticCache

BATCH, BAD = 40, (7, 31)
MODEL = tiny_model()


SELECTORS = {
    **{name: lambda name=name: hasher_for(MODEL, name) for name in ("linear", "paper", "planes", "transform")},
    "lsh": lambda: LshSelector(MODEL.config),
    "per query head": lambda: HashSelector(hasher_for(MODEL), per_query_head=True),
    "own hasher": SignHasher,
    "oracle": OracleSelector,
    "oracle per query head": lambda: OracleSelector(per_query_head=True),
    "recent": RecentSelector,
}


def run(selector, rows, static, bad=(), padded=False):
    """Logits of some steps and a last chunk; bad: by sequence, (number, layer, step, module whose output it enters)."""
    ids, mask = prompts(tuple(40 - i % 5 if padded else 40 for i in range(BATCH)))
    logits, kept = [], StaticCache(MODEL.config, 40) if static else DynamicCache(config=MODEL.config)

    def spoil(row, number, layer, when, name):
        def hook(module, args, out):
            if len(logits) == when:
                out[row, -1, 3] = number

        return getattr(MODEL.model.layers[layer].self_attn, name).register_forward_hook(hook)

    with torch.no_grad(), Attachment(MODEL, selector, Budget(0.3), sparse_rows=rows):
        handles = [spoil(*one) for one in bad]
        for first, last in ((0, 30), (30, 31), (31, 32), (32, 33), (33, 40)):
            seen = mask[:, :last] if padded else None
            logits.append(MODEL(ids[:, first:last], attention_mask=seen, past_key_values=kept).logits)
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.sample(3)
@pytest.mark.parametrize(("padded", "static", "rows"), [(False, False, None), (True, False, 0), (True, True, None)])
@pytest.mark.parametrize("name", SELECTORS)
def test_bad_rows_leave_the_others_alone(name, padded, static, rows):
    whole = run(SELECTORS[name](), rows, static, padded=padded)
    others = [row for row in range(BATCH) if row not in BAD]
    draw = torch.Generator().manual_seed(len(name))
    for module in ("k_proj", "v_proj") if padded else ("q_proj", "k_proj", "v_proj", "o_proj"):
        layers, steps = torch.randint(0, 4, (2, 2), generator=draw).tolist()
        bad = list(zip(BAD, (torch.nan, torch.inf), layers, steps, [module] * 2, strict=True))
        found = run(SELECTORS[name](), rows, static, bad, padded)
        for one, other in zip(found, whole, strict=True):
            assert torch.equal(one[others], other[others])
        assert found[steps[0]][BAD[0], -1].isnan().all()
