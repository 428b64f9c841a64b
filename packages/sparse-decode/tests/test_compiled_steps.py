"""A compiled decode step of a static cache: one graph, in which ours is opaque operators on the CPU."""

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import attach
from sparse_decode.budget import LayerBudget
from sparse_decode.compiled import attend_step
from sparse_decode.select import HashSelector, RecentSelector
from sparse_decode.step import RowRule, SparseLayer
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
PROMPT, END, ROOM = 40, 44, 63


def calibrated(hasher):
    for index in range(CONFIG.num_hidden_layers):
        hasher.layer(index).remainder.copy_(torch.tensor([-1.0, 0.4, 0.5, 0.05, 0.1, 0.6]))
    return hasher


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("variant", "remainder"), [("transform", True), ("planes", False), ("lsh", True), ("paper", False)]
)
def test_a_compiled_step_is_one_graph(variant, remainder):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = AutoModelForCausalLM.from_config(CONFIG).eval()
    selector = HashSelector(calibrated(Hasher(HasherConfig(variant, ModelShape.of(CONFIG), bits=64), 0)))
    ids, mask = torch.randint(1, 64, (2, END)), torch.ones(2, ROOM, dtype=torch.long)
    mask[0, :7] = 0
    graphs, logits, counts = [], [], []

    def backend(graph, given):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph

    caches = StaticCache(config=CONFIG, max_cache_len=ROOM), DynamicCache(config=CONFIG)
    with torch.no_grad(), attach(model, selector, LayerBudget(0.2), remainder=remainder) as attachment:
        assert attachment.remainder == remainder
        for cache, step in zip(caches, (torch.compile(model, fullgraph=True, backend=backend), model), strict=True):
            attachment.reset_density()
            model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], past_key_values=cache)
            found = []
            for i in range(PROMPT, END):
                seen = mask[:, : i + 1] if step is model else mask * (torch.arange(ROOM) <= i)
                found.append(step(ids[:, i : i + 1], attention_mask=seen, past_key_values=cache).logits)
            logits.append(torch.cat(found, 1))
            counts.append(attachment.counts())
    near = 1e-4 if remainder else 1e-5  # both round the covariance to 8 bits, of other numbers of tokens
    torch.testing.assert_close(logits[0], logits[1], atol=near, rtol=near)
    assert counts[0] == counts[1]
    assert len(graphs) == 1
    ours = {name for name in graphs[0] if name.startswith(("sparse_decode.", "hashcore."))}
    assert ours == {"sparse_decode.attend_step.default"} | {"sparse_decode.write_codes.default"}
    torch._dynamo.reset()


@pytest.mark.slow
def test_inductor_compiles_a_step_of_the_opaque_operator():
    """Other backends are easier to please: they compile an operator that changes an empty list."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 1})
    model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.randint(1, 64, (1, END))
    logits = []
    with torch.no_grad(), attach(model, RecentSelector(), LayerBudget(0.2), dense_layers=0):
        for step in (model, torch.compile(model, fullgraph=True)):
            cache = StaticCache(config=config, max_cache_len=ROOM)
            model(ids[:, :PROMPT], past_key_values=cache)
            logits.append(step(ids[:, PROMPT : PROMPT + 1], past_key_values=cache).logits)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize(("dense_below", "read"), [(0, 10), (100, 50)])
def test_the_opaque_operator_counts_a_step_without_a_mask(dense_below, read):
    plan = SparseLayer(0, RecentSelector(), LayerBudget(0.2, dense_below=dense_below), RowRule(None))
    q, k, v = (torch.randn(2, heads, n, 16) for heads, n in ((4, 1), (2, 50), (2, 50)))
    for _ in range(3):
        attend_step(q, k, v, None, None, None, None, [plan.placeholder], plan.number, 0.25, None)
    assert plan.tally.totals() == (3 * 2 * 4 * read, 3 * 2 * 4 * 50)
