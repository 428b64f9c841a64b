"""The traffic model: its bounds, and its estimate of candidates against the kernels."""

import numpy as np
import pytest
from hashcore_samples import random_codes

pytest.importorskip("torch", reason="the launches are described on torch tensors")
import gpu_traffic as traffic
from hashcore.cuda import kept, layout, operands, tensor_search, tensors

torch = pytest.importorskip("torch")
simulated = pytest.importorskip("simulated", reason="g++ is needed")

SMS = {"A100": 108, "H200": 132, "L4": 58, "RTX 4090": 128}
PLANES = [tuple(1 << p for p in range(count)) for count in range(1, 7)]


@pytest.mark.parametrize("device", SMS)
@pytest.mark.parametrize("weights", PLANES, ids=len)
def test_a_search_moves_little_beside_the_codes(device, weights):
    found = traffic.search(8, 131_072, 4, weights, 131_072 // 50, SMS[device])
    assert found.codes == 8 * 131_072 * 16
    assert found.beside <= 0.1


@pytest.mark.parametrize("n", [65_536, 524_288, 2_097_152])
def test_other_lengths(n):
    assert traffic.search(8, n, 4, PLANES[5], n // 50, 132).beside <= 0.1


@pytest.mark.parametrize(("page", "most"), [(16, 1.02), (32, 1.015), (128, 1.01)])
def test_page_tables_add_little(page, most):
    """Whole pages of codes in whole sectors: what is added is the tables, a word for each page and row."""
    contiguous = traffic.search(8, 131_072, 4, PLANES[5], 131_072 // 50, 132)
    paged = traffic.search(8, 131_072, 4, PLANES[5], 131_072 // 50, 132, page=page)
    assert paged.codes == contiguous.codes
    assert paged.tables >= 8 * 4 * 131_072 / page
    assert 1 < paged.total / contiguous.total < most
    assert paged.total - contiguous.total == pytest.approx(paged.tables)


@pytest.mark.parametrize("weights", [PLANES[2], PLANES[5]], ids=len)
def test_the_kernels_list_as_many_candidates_as_predicted(monkeypatch, weights):
    """Two blocks a row, each with its sample; random bits in all planes."""
    monkeypatch.setattr(tensors, "SIMULATED_SMS", 2)
    rng, n, k = np.random.default_rng(3), 16_384, 327
    query, keys = (torch.from_numpy(random_codes(rng, 1, rows, 4)) for rows in (len(weights), n))
    scratch = simulated.Scratch()
    monkeypatch.setattr(kept, "scratch", scratch)
    out = torch.zeros(1, k, dtype=torch.int32), torch.zeros(1, k, dtype=torch.int32)
    tensor_search.search(query, keys, k, weights, operands.Bounds(), *out, simulated.Device())
    space = layout.SearchSpace.plan(1, 1, n, k, 2)
    listed = int(scratch.tensor[space.counts : space.counts + space.splits * layout.WARPS].sum())
    assert k <= listed
    assert listed == pytest.approx(traffic.candidates(n, 4, weights, k, space.splits), rel=0.25)
