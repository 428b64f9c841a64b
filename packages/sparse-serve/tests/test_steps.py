"""Whole steps of a layer on stand-ins for vLLM: each row attends to its own tokens, in either page layout."""

import random
from types import SimpleNamespace

import pytest
import torch
from serve_doubles import DIM, HEADS, QUERIES, SIZE, FullAttentionSpec, built, engine, impls
from sparse_decode.caches import buffer

PAGES = 24


class Layer:
    """A layer of an engine, whose requests are given pages; unowned pages hold NaN."""

    def __init__(self, backend, asked, seed):
        config, specs = engine(backend, asked, [(FullAttentionSpec(), {})])
        (self.builder,), (self.impl,) = built(backend, config, specs), impls(config)
        self.impl.kv_cache_dtype = "auto"
        page = specs[0].page_size_bytes // 4
        self.memory = torch.full((PAGES, page), torch.nan)
        self.cache = self.memory[:, : 2 * HEADS * SIZE * DIM].view(PAGES, HEADS, SIZE, 2 * DIM)
        self.layer = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0, isa="vec")
        self.draw, self.random = random.Random(seed), torch.Generator().manual_seed(seed)
        self.free = list(range(PAGES))
        self.draw.shuffle(self.free)
        self.requests = {}

    def begin(self, name, prompt, prefix=None):
        """Begin a request, with the whole pages of another one as its prefix."""
        own = {"pages": [], "k": [], "v": [], "prompt": prompt}
        if prefix is not None:
            shared = self.requests[prefix]
            whole = min(len(shared["k"]) // SIZE, (prompt - 1) // SIZE)
            own |= {
                "pages": shared["pages"][:whole],
                "k": shared["k"][: whole * SIZE],
                "v": shared["v"][: whole * SIZE],
            }
        self.requests[name] = own

    def end(self, name):
        gone = self.requests.pop(name)
        kept = {page for own in self.requests.values() for page in own["pages"]}
        for page in set(gone["pages"]) - kept:
            self.memory[page] = torch.nan
            self.free.append(page)

    def step(self, counts):
        """Process so many tokens of each request; return what the layer and plain attention give, [T, Hq, D] each."""
        tokens = sum(counts.values())
        q = torch.randn(tokens, QUERIES, DIM, generator=self.random)
        k, v = torch.randn(2, tokens, HEADS, DIM, generator=self.random)
        slots, starts, lengths, said, expected = [], [0], [], [], torch.empty_like(q)
        table = torch.full((len(counts), PAGES), -1, dtype=torch.int32)
        for row, (name, count) in enumerate(counts.items()):
            own, first = self.requests[name], starts[-1]
            said.append(len(own["k"]) < own["prompt"])
            for i in range(first, first + count):
                if len(own["k"]) % SIZE == 0:
                    own["pages"] = [*own["pages"], self.free.pop(0)]
                slots.append(own["pages"][-1] * SIZE + len(own["k"]) % SIZE)
                own["k"], own["v"] = [*own["k"], k[i]], [*own["v"], v[i]]
                expected[i] = plain(q[i], torch.stack(own["k"]), torch.stack(own["v"]), self.impl.scale)
            starts.append(first + count)
            lengths.append(len(own["k"]))
            table[row, : len(own["pages"])] = torch.tensor(own["pages"])
        common = SimpleNamespace(
            query_start_loc=torch.tensor(starts, dtype=torch.int32), block_table=table, causal=True
        )
        common.seq_lens, common.slot_mapping = torch.tensor(lengths, dtype=torch.int32), torch.tensor(slots)
        common.is_prefilling = torch.tensor(said)
        made, out = self.builder.build(0, common), torch.zeros_like(q)
        self.impl.forward(self.layer, q, k, v, self.cache, made, output=out)
        return out, expected, made.spotlight


def plain(q, k, v, scale):
    """Attend from one token [Hq, D] to its own and those before it, [N, H, D]."""
    k, v = (x.repeat_interleave(len(q) // x.shape[1], 1) for x in (k, v))
    return torch.einsum("hn,nhd->hd", (torch.einsum("hd,nhd->hn", q, k) * scale).softmax(-1), v)


def asking(asked, **more):
    return {"spotlight": asked["spotlight"] | more}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("below", [0, 1, 40, 70])
def test_rows_of_any_kind_attend_to_their_own_tokens(below, seed, backend, asked):
    layer, names, kinds = Layer(backend, asking(asked, fraction=1.0, dense_below=below), seed), iter(range(99)), set()
    for _ in range(40):
        draw = layer.draw
        if len(layer.requests) < 3 and len(layer.free) > 12:
            prefix = draw.choice([None, *layer.requests])
            layer.begin(next(names), draw.choice([1, 5, 33, 64, 70]), prefix)
        counts = {}
        for name, own in layer.requests.items():
            left = own["prompt"] - len(own["k"])
            counts[name] = draw.randint(1, left) if left > 0 else 1
        out, expected, batch = layer.step(dict(draw.sample(sorted(counts.items()), len(counts))))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        kinds |= {"plain" if batch.plain else "mixed" if batch.stock else "by rows"}
        kinds |= {"prompts by rows"} if batch.prompts else set()
        for name in [name for name, own in layer.requests.items() if len(own["k"]) > own["prompt"] + 25]:
            layer.end(name)
    assert len(kinds) > 1 or below == 70


def test_every_kind_of_step_occurs(backend, asked):
    layer = Layer(backend, asking(asked, fraction=1.0, dense_below=40), 0)
    layer.begin("a", 35)
    assert layer.step({"a": 35})[2].plain
    for _ in range(4):
        assert layer.step({"a": 1})[2].plain
    crossing = layer.step({"a": 1})[2]
    assert (len(crossing.moves.moved), crossing.plain, crossing.stock) == (2, False, None)
    layer.begin("b", 5)
    assert layer.step({"a": 1, "b": 5})[2].stock is not None
    layer.begin("c", 33, "a")
    out, expected, batch = layer.step({"a": 1, "c": 1, "b": 1})
    assert batch.prompts is not None
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    layer.begin("e", 41)
    layer.step({"e": 40})
    assert layer.step({"e": 1})[2].plain, "the last token of a prompt is no decode step"
    assert not layer.step({"e": 1})[2].plain
    layer.begin("d", 2)
    for counts in ({"a": 1, "c": 3}, {"c": 1, "d": 0}, {"d": 2, "a": 4}):  # recomputed after a preemption; padding
        out, expected, _ = layer.step(counts)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_steps_below_the_break_even_are_vllms_bit_for_bit(backend, asked):
    layer = Layer(backend, asking(asked, fraction=0.1, dense_below=1000), 0)
    stock = Layer(backend, {}, 0)
    for name in ("a", "b"):
        for each in (layer, stock):
            each.begin(name, 30)
    stock.memory[:] = 0  # vLLM's own has no such protection
    for counts in ({"a": 30}, {"b": 20, "a": 1}, {"b": 10, "a": 1}, *[{"a": 1, "b": 1}] * 40):
        common = layer.step(counts)
        assert torch.equal(common[0], plainly(stock, counts))
    assert torch.equal(*(x.cache[x.requests["a"]["pages"]] for x in (layer, stock)))
    assert layer.impl.calls == stock.impl.calls
    tokens = sum(30 + i for i in range(1, 43)) + sum(30 + i for i in range(1, 41))
    assert layer.impl._paged.selected == layer.impl._paged.visible == QUERIES * tokens


def plainly(stock, counts):
    """A step of an engine without the plug-in."""
    stock.builder.build = lambda first, common: SimpleNamespace(**vars(common), spotlight=None)
    return stock.step(counts)[0]


def test_codes_are_those_of_the_keys_whenever_they_are_hashed(backend, asked):
    layer = Layer(backend, asking(asked, dense_below=40), 0)
    layer.begin("a", 38)
    for counts in (38, 1, 1, 1, 1):
        layer.step({"a": counts})
    own = layer.requests["a"]
    pages = layer.impl._served.pages(layer.cache)
    found = pages.codes[own["pages"]].transpose(1, 2).flatten(0, 1)[: len(own["k"])]
    assert torch.equal(found, layer.impl._paged.encode(torch.stack(own["k"])))
    rows = pages.k[own["pages"]].transpose(1, 2).flatten(0, 1)[: len(own["k"])]
    assert torch.equal(rows, torch.stack(own["k"]))


def test_a_cache_is_put_in_huge_pages_before_its_first_step_and_not_again(backend, asked, monkeypatch):
    advised = []
    monkeypatch.setattr(buffer, "_SIZE", 4096)
    monkeypatch.setattr(buffer, "_advise", lambda: lambda *given: advised.append(given))
    layer = Layer(backend, asking(asked, dense_below=1), 0)
    layer.begin("a", 3)
    for counts in (3, 1, 1):
        layer.step({"a": counts})
    (start, size, _), again = advised
    assert layer.memory.data_ptr() <= start < start + size <= layer.memory.data_ptr() + layer.memory.nbytes
    assert size > layer.memory.nbytes - 2 * 4096
    assert again[:2] == (start, size)
