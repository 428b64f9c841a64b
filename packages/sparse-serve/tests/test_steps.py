"""Whole steps of a layer on stand-ins for vLLM: each row attends to its own tokens."""

import random

import pytest
import torch
from serve_doubles import DIM, HEADS, SIZE, FullAttentionSpec, Requests, built, engine, impls
from sparse_decode.caches import buffer

PAGES = 24


class Layer:
    """A layer of an engine, whose requests are given pages; unowned pages hold NaN."""

    def __init__(self, backend, asked, seed):
        config, specs = engine(backend, asked, [(FullAttentionSpec(), {})])
        (self.builder,), (self.impl,) = built(backend, config, specs), impls(config)
        self.memory = torch.full((PAGES, specs[0].page_size_bytes // 4), torch.nan)
        self.cache = self.memory[:, : 2 * HEADS * SIZE * DIM].view(PAGES, HEADS, SIZE, 2 * DIM)
        self.requests, self.draw = Requests(seed, PAGES, torch.float32), random.Random(seed)
        self.kept = torch.empty(2, PAGES * SIZE, HEADS, DIM)  # keys and values, by slot

    def end(self, name):
        self.memory[list(self.requests.end(name))] = torch.nan

    def step(self, counts):
        """Process so many tokens of each request; return what the layer and plain attention give, [T, Hq, D] each."""
        common, (q, k, v) = self.requests.step(counts)
        self.kept[:, common.slot_mapping] = torch.stack([k, v])
        expected = []
        for name, count in counts.items():
            slots = self.requests.slots(name)
            for end in range(len(slots) - count + 1, len(slots) + 1):
                expected.append(plain(q[len(expected)], *self.kept[:, slots[:end]], self.impl.scale))
        made, out = self.builder.build(0, common), torch.zeros_like(q)
        self.impl.do_kv_cache_update(None, k, v, self.cache, common.slot_mapping)
        self.impl.forward(None, q, k, v, self.cache, made, output=out)
        return out, torch.stack(expected), getattr(made, "spotlight", None)


def plain(q, k, v, scale):
    """Attend from one token [Hq, D] to its own and those before it, [N, H, D]."""
    k, v = (x.repeat_interleave(len(q) // x.shape[1], 1) for x in (k, v))
    return torch.einsum("hn,nhd->hd", (torch.einsum("hd,nhd->hn", q, k) * scale).softmax(-1), v)


def asking(asked, **more):
    return {"spotlight": asked["spotlight"] | more}


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_any_kind_attend_to_their_own_tokens(seed, backend, asked):
    layer, names, kinds = Layer(backend, asking(asked, fraction=1.0), seed), iter(range(99)), set()
    for _ in range(40):
        draw, requests = layer.draw, layer.requests
        if len(requests.lengths) < 3 and len(requests.free) > 12:
            prefix = draw.choice([None, *requests.lengths])
            requests.begin(next(names), draw.choice([1, 5, 33, 64, 70]), prefix)
        left = {name: prompt - requests.lengths[name] for name, prompt in requests.prompts.items()}
        counts = {name: draw.randint(1, count) if count > 0 else 1 for name, count in left.items()}
        out, expected, batch = layer.step(dict(draw.sample(sorted(counts.items()), len(counts))))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        kinds.add((batch.prompts is not None, len(batch.rows) > 0))
        for name in [name for name, prompt in requests.prompts.items() if requests.lengths[name] > prompt + 25]:
            layer.end(name)
    assert len(kinds) == 3


def test_prompts_are_vllms_bit_for_bit(backend, asked):
    layer, stock = Layer(backend, asking(asked, fraction=0.1), 0), Layer(backend, {}, 0)
    stock.memory[:] = 0  # vLLM's kernel multiplies what a page held before by 0, which NaN survives
    for name in ("a", "b"):
        for each in (layer, stock):
            each.requests.begin(name, 40)
    for counts in ({"a": 30}, {"b": 20, "a": 10}, {"b": 20}):
        assert torch.equal(layer.step(counts)[0], stock.step(counts)[0])
    assert layer.impl.paged.visible == 0


def test_codes_are_those_of_the_keys(backend, asked):
    layer = Layer(backend, asked, 0)
    layer.requests.begin("a", 38)
    for counts in (38, 1, 1, 1, 1):
        layer.step({"a": counts})
    keys, table = layer.kept[0, layer.requests.slots("a")], layer.requests.tables["a"]
    pages = layer.impl.pages(layer.cache)
    codes, rows = (x[table].transpose(1, 2).flatten(0, 1)[: len(keys)] for x in (pages.codes, pages.k))
    assert torch.equal(codes, layer.impl.paged.encode(keys))
    assert torch.equal(rows, keys)


def test_a_cache_is_put_in_huge_pages_before_its_first_step_and_not_again(backend, asked, monkeypatch):
    advised = []
    monkeypatch.setattr(buffer, "_SIZE", 4096)
    monkeypatch.setattr(buffer, "_advise", lambda: lambda *given: advised.append(given))
    layer = Layer(backend, asked, 0)
    layer.requests.begin("a", 3)
    for counts in (3, 1, 1):
        layer.step({"a": counts})
    (start, size, _), again = advised
    assert layer.memory.data_ptr() <= start < start + size <= layer.memory.data_ptr() + layer.memory.nbytes
    assert size > layer.memory.nbytes - 2 * 4096
    assert again[:2] == (start, size)
