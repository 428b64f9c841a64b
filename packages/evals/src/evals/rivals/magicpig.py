"""MagicPIG (Chen et al. 2024, arXiv 2410.16179): attention over a sample of tokens drawn by hash tables.

1. L tables of K sign bits each hash the query, and the keys minus their mean, a shift that softmax ignores.
2. A key is drawn if it shares its bucket with the query in at least 2 tables. A pair at angle t shares one bit with
   probability p = 1 - t / pi, a bucket with P = p^K, and is drawn with w = 1 - (1 - P)^L - L P (1 - P)^(L - 1).
3. Attention is the softmax of logit - log w over the drawn tokens: the self-normalised estimate of importance
   sampling. The first and the last tokens are always attended to, uncorrected.
"""

import copy
import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from sparse_decode import Rows
from sparse_decode.cpu.kernel_threads import run
from sparse_decode.select import NoCodes
from torch import Tensor

from evals.rivals.seen import listed, ranks, seen_by

_CHUNK = 4096  # keys hashed at once
_SMALL = 1e-4  # for smaller L P, w is approximated by L (L - 1) / 2 P^2, to 4 digits: the difference would cancel


def log_draw_probability(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """Compute log w, the log of the probability that a key with this cosine is drawn: float64, shaped as `cosine`."""
    p = 1 - cosine.double().clamp(-1, 1).acos() / math.pi
    bucket = p**bits
    miss = torch.log1p(-bucket.clamp(max=1 - 1e-12))
    w = 1 - (tables * miss).exp() - tables * bucket * ((tables - 1) * miss).exp()
    first = math.log(tables * (tables - 1) / 2) + 2 * bits * p.clamp(min=1e-12).log()
    return torch.where(tables * bucket < _SMALL, first, w.clamp(min=1e-300).log())


@dataclass(eq=False)
class MagicPigSelector(NoCodes):
    """Selects, per query head, the tokens that the tables draw, and corrects their logits for the draw probability.

    K and L decide how many tokens it takes; a row's budget matters only if it is 0 or all. Compare measured densities.

    Args:
        bits: K, at most 31; tables: L, at least 2. The Spotlight Attention paper uses 15 and 100.
        sink, local: numbers of first and last visible tokens that are always attended to, in addition to the sample.
        prefill: rows that see at most this many tokens attend to all of them. The keys of these first tokens, without
            sink and local ones, give the mean (1,024, as in that paper's perplexity protocol). See `after_prompt`.
        seed: draws the hash functions, which the heads of a layer share.

    Attributes:
        sampled: number of (row, head) pairs sampled so far; empty: how many of them drew no token and had no sink or
            local one. They attend to their own token, where the original divides zero by zero.
    """

    bits: int = 15
    tables: int = 100
    sink: int = 4
    local: int = 64
    prefill: int = 1024
    seed: int = 0
    sampled: int = field(default=0, init=False)
    empty: int = field(default=0, init=False)

    variant: ClassVar[str] = "magicpig"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 31 or self.tables < 2:
            raise ValueError(f"bits must be 1 to 31 and tables 2 or more, got {self.bits} and {self.tables}")
        if self.sink < 0 or self.local < 0 or self.prefill <= self.sink + self.local:
            raise ValueError(f"prefill must be above sink + local, got {self.prefill}, {self.sink} and {self.local}")

    @property
    def dense_rows(self) -> int:
        """Rows that see at most this many tokens attend to all of them."""
        return self.prefill

    @property
    def code_bits(self) -> int:
        """Bits of its codes per token and KV head: a bucket in each table, without the tables' pointers."""
        return self.bits * self.tables

    def kept_bits(self, head_dim: int) -> int:
        """Return the bits that it stores per token and KV head."""
        return self.code_bits

    def after_prompt(self, tokens: int) -> "MagicPigSelector":
        """Return the selector for rows after a dense prompt of this many tokens, as in the authors' code.

        All keys of the prompt except sink and local ones give the mean, and every row after it is sampled. If the
        prompt has at most sink + local tokens, keys are not centred. Here local tokens are always the last visible
        ones; in the authors' code they are the last of the prompt and all after it.
        """
        if tokens < 0:
            raise ValueError(f"tokens must be 0 or more, got {tokens}")
        served = copy.copy(self)
        served.prefill, served.sampled, served.empty = tokens, 0, 0
        return served

    def select(self, rows: Rows) -> Tensor:
        """Select tokens, int64 [B, Hq, Q, K]; see `Selector`."""
        seen = seen_by(rows)
        always, whole = self._always(rows, seen)
        drawn = self._drawn(rows, seen) & seen[:, None]
        tokens = drawn | always[:, None]
        sparse = (rows.counts > 0)[:, None] & ~whole[:, None]
        empty = sparse & ~tokens.any(-1)
        self.sampled += int(sparse.sum()) * rows.q.shape[1]
        self.empty += int(empty.sum())
        own = seen & (seen.cumsum(-1) == seen.sum(-1, keepdim=True))  # each row's last token
        tokens = tokens | (empty[..., None] & own[:, None])
        return listed(tokens & (rows.counts > 0)[:, None, :, None])

    def attend(self, rows: Rows, v: Tensor, indices: Tensor) -> Tensor:
        """Attend to the selected tokens of v [B, Hkv, N, Dv] with corrected logits: [B, Q, Hq, Dv] in q's type."""
        (batch, hq, n_rows, dim), (hkv, n) = rows.q.shape, rows.k.shape[1:3]
        seen = seen_by(rows)
        always, _ = self._always(rows, seen)
        taken = torch.zeros(batch, hq, n_rows, n + 1, dtype=torch.bool, device=indices.device)
        taken = taken.scatter_(-1, indices.masked_fill(indices < 0, n), True)[..., :n]
        q, k = rows.q.detach().float().reshape(batch, hkv, -1, dim), rows.k.detach().float()
        logits = (q @ k.transpose(-1, -2)).view(batch, hq, n_rows, n) * rows.scaling
        if rows.softcap is not None:
            logits = rows.softcap * (logits / rows.softcap).tanh()
        centred = k - self._mean(rows, seen)
        unit_q, unit_k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(centred, dim=-1)
        cosine = (unit_q @ unit_k.transpose(-1, -2)).view_as(logits)
        sampled = taken & ~always[:, None]
        logits[sampled] -= log_draw_probability(cosine[sampled], self.bits, self.tables).float()
        logits = logits.masked_fill(~taken, -torch.inf)
        p = logits.softmax(-1).nan_to_num(0)  # rows that are not sparse have no tokens
        if rows.sinks is not None:
            p = p * (logits.logsumexp(-1, keepdim=True) - rows.sinks.float()[:, None, None]).sigmoid()
        values = v.detach().float()
        out = p.view(batch, hkv, -1, n) @ values
        return out.view(batch, hq, n_rows, -1).transpose(1, 2).to(rows.q.dtype)

    def buckets(self, layer: int, x: Tensor) -> Tensor:
        """Hash vectors [B, H, T, D] of a layer to one bucket per table, int32 [B, H, T, L]."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + layer)
        # Drawn on the CPU, so that the functions are the same on every device.
        size = x.shape[-1], self.tables * self.bits
        planes = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(x.device)
        powers = 2.0 ** torch.arange(self.bits, dtype=torch.float64, device=x.device)
        found = []
        for part in x.detach().float().split(_CHUNK, dim=2):
            signs = (part @ planes > 0).unflatten(-1, (self.tables, self.bits))
            found.append((signs.double() @ powers).to(torch.int32))
        return torch.cat(found, dim=2)

    def _always(self, rows: Rows, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens that are always attended to, bool [B, Q, N], and the rows that read all, bool [B, Q]."""
        total = seen.sum(-1)
        whole = (rows.counts >= total) | (total <= self.prefill)
        rank = seen.cumsum(-1) - 1
        ends = (rank < self.sink) | (rank >= (total - self.local)[..., None])
        return seen & (ends | whole[..., None]), whole

    def _mean(self, rows: Rows, seen: Tensor) -> Tensor:
        """Average the keys of the prefill except sink and local ones: float32 [B, Hkv, 1, D]."""
        rank = ranks(seen)
        inner = ((rank >= self.sink) & (rank < self.prefill - self.local))[:, None, :, None]
        keys = rows.k.detach().float().masked_fill(~inner, 0)
        return keys.sum(2, keepdim=True) / inner.sum(2, keepdim=True).clamp(min=1)

    def _drawn(self, rows: Rows, seen: Tensor) -> Tensor:
        """Return which keys share at least 2 buckets with each query: bool [B, Hq, Q, N]."""
        queries = self.buckets(rows.layer, rows.q).cpu()
        keys = self.buckets(rows.layer, rows.k.detach().float() - self._mean(rows, seen)).cpu()
        (batch, hq, n_rows, _), n = queries.shape, keys.shape[2]
        drawn = np.zeros((batch, hq, n_rows, n), dtype=bool)
        tasks, arrays = batch * hq * n_rows, (queries.numpy(), keys.numpy(), seen.cpu().numpy(), drawn)
        run(_match, tasks, tasks * n * self.tables // 16, *arrays)
        return torch.from_numpy(drawn).to(rows.q.device)


def _match(first, last, queries, keys, seen, out):  # pragma: no cover - compiled
    hq, n_rows = queries.shape[1:3]
    group, n = hq // keys.shape[1], keys.shape[2]
    for task in range(first, last):
        b, h, r = task // (hq * n_rows), task // n_rows % hq, task % n_rows
        query, table = queries[b, h, r], keys[b, h // group]
        for j in range(n):
            if seen[b, r, j]:
                hits = 0
                key = table[j]
                for i in range(len(query)):
                    hits += query[i] == key[i]
                out[b, h, r, j] = hits >= 2
