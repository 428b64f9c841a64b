"""A graph that searches keys in pages on a GPU, against the CPU; test_cuda.py has searches without one."""

import hashcore
import numpy as np
import pytest
from hashcore_samples import pool_of, random_codes, shuffled_tables

torch = pytest.importorskip("torch", reason="torch is an optional extra of hashcore")
pytest.importorskip("cuda.core", reason="cuda-core comes with the extra hashcore[cuda]")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; test_pages_cuda.py runs on the CPU"),
]
PLANES = (1, 2, 4, 8, 16, 32)


def case(rng, lengths, size, words=4):
    """Query planes, pages of two heads, tables and lengths, in host memory."""
    lengths = np.asarray(lengths)
    tables, pages = shuffled_tables(rng, lengths, size, 2, 3)
    pool = pool_of(rng, pages + 1, size, 2, words, heads_outside=True, tail=3 + words)
    query = random_codes(rng, len(lengths), 2, len(PLANES), words)
    rows = lengths[:, None]
    return [torch.from_numpy(np.ascontiguousarray(x)) for x in (query, pool, tables.astype(np.int32)[:, None], rows)]


def test_a_graph_replays_on_other_pages(rng):
    query, pool, blocks, lengths = case(rng, [5000, 3000], 32)
    given = [x.cuda() for x in (query, pool, blocks, lengths)]
    out = torch.empty(2, 2, 60, dtype=torch.int32, device="cuda"), torch.empty(2, 2, 60, device="cuda").long()

    def search():
        q, keys, tables, ends = given
        hashcore.search(q, keys, 60, PLANES, blocks=tables, lengths=ends, order="index", out=out)

    search()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        search()
    for ends in ([5000, 3000], [100, 2999]):
        shuffled = torch.from_numpy(rng.permutation(pool.shape[1]).astype(np.int32))[: blocks.shape[2]]
        given[2].copy_(shuffled.expand(blocks.shape))
        given[3].copy_(torch.tensor(ends)[:, None])
        graph.replay()
        tables, seen = given[2].cpu(), given[3].cpu()
        expected = hashcore.search(query, pool, 60, PLANES, blocks=tables, lengths=seen, order="index")
        for ours, theirs in zip(out, expected, strict=True):
            assert torch.equal(ours.cpu(), theirs)
