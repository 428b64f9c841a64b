"""Inputs of the operator `gather`, and its results in float64: no kernel and no device is needed for them."""

import torch
from sparse_decode.inputs import Inputs
from sparse_decode.reference import Rest, attend_row

# D, Dv, type. Head sizes of all three widths of reads, for keys and for values.
KINDS = [(128, 128, torch.bfloat16), (64, 64, torch.float16), (80, 48, torch.bfloat16), (32, 256, torch.float16)]
# Weights are rounded to the type before they multiply values of a few units.
CLOSE = {torch.bfloat16: {"rtol": 1e-2, "atol": 2e-2}, torch.float16: {"rtol": 1e-2, "atol": 3e-3}}
BEYOND = torch.tensor([-1, -5, 2**40, -(2**62), 1 << 20])
"""Indices that stand for nothing."""


def make(kind=KINDS[0], group=2, sets=2, tokens=90, width=40, batch=1, queries=1, seed=0, ends=(0, 0), unused=BEYOND):
    """q, k, v and indices, of which some stand for nothing and none lie within the ends."""
    dim, value_dim, dtype = kind
    draw = torch.Generator().manual_seed(seed)
    shapes = [(batch, sets * group, queries, dim), (batch, sets, tokens, dim), (batch, sets, tokens, value_dim)]
    q, k, v = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    size = batch, sets, queries, width
    inner = max(1, tokens - sum(ends))
    indices = torch.randint(0, inner, size, generator=draw) + ends[0]
    dead = torch.rand(size, generator=draw) < (0.1 if tokens > sum(ends) else 2)
    return q, k, v, torch.where(dead, unused[torch.randint(0, len(unused), size, generator=draw)], indices)


def rest_of(q, k, v, seed=0):
    """What a selection leaves out, as the operator takes it; the last row sees no more than a token."""
    (batch, hq, rows, dim), draw = q.shape, torch.Generator().manual_seed(seed)
    coefficients = torch.tensor([-0.3, 0.5, 0.4, 0.1, -0.1]) + 0.1 * torch.rand(hq, 5, generator=draw)
    means = torch.randn(batch, k.shape[1], rows, dim, generator=draw)
    values = torch.randn(batch, hq, rows, v.shape[3], generator=draw)
    visible = torch.full((batch, rows), k.shape[2] + 1000)
    visible[-1, -1] = 1
    return coefficients, means, values, visible


class _Rest(Rest):
    def __init__(self, b, h, r, group, coefficients, means, values, visible):
        self.visible, self.mean_key = int(visible[b, r]), means[b, h // group, r].double()
        self.value, self._c = values[b, h, r].double(), coefficients[h].double()


def read(n, indices, ends=(0, 0), always=None):
    """Tokens that a row reads, given its indices [K]."""
    listed = indices if always is None else torch.cat([always, indices])
    live = listed[(listed >= 0) & (listed < n)]
    sink = min(ends[0], n)
    return torch.cat([torch.arange(sink), live, torch.arange(max(sink, n - ends[1]), n)])


def expected(q, k, v, indices, scaling, softcap=None, sinks=None, rest=None, ends=(0, 0), always=None):
    """The result of `gather`: [B, Q, Hq, Dv]."""
    out, x = q.new_zeros(len(q), q.shape[2], q.shape[1], v.shape[3]), Inputs(q, k, v, scaling, softcap, sinks)
    for b, h, r in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        listed = None if always is None else always[b]
        tokens = read(k.shape[2], indices[b, h * indices.shape[1] // q.shape[1], r], ends, listed)
        left = None if rest is None else _Rest(b, h, r, q.shape[1] // k.shape[1], *rest)
        out[b, r, h] = attend_row(x, b, h, r, tokens, left)
    return out


def poisoned(k, v, indices, ends=(0, 0), always=None):
    """Keys and values with NaN in every token that no row of the head reads."""
    k, v = k.clone(), v.clone()
    group = indices.shape[1] // k.shape[1]
    for b in range(len(k)):
        for h in range(k.shape[1]):
            chosen = indices[b, h * group : (h + 1) * group].flatten()
            unread = torch.ones(k.shape[2], dtype=torch.bool)
            unread[read(k.shape[2], chosen, ends, None if always is None else always[b])] = False
            k[b, h, unread], v[b, h, unread] = torch.nan, torch.nan
    return k, v


def in_pages(k, v, size=16, seed=0):
    """The same keys and values in pages, of which the last ones belong to no row: k, v, blocks int32 [B, T]."""
    batch, heads, n, _ = k.shape
    each = -(-n // size)
    order = torch.randperm(batch * each + 2, generator=torch.Generator().manual_seed(seed))
    blocks, found = order[: batch * each].view(batch, each), []
    for x in (k, v):
        pages = x.new_full((len(order), heads, size, x.shape[3]), torch.nan)
        room = x.new_full((batch, heads, each * size, x.shape[3]), torch.nan)
        room[:, :, :n] = x
        pages[blocks] = room.unflatten(2, (each, size)).transpose(1, 2)
        found.append(pages)
    return *found, blocks.int()
