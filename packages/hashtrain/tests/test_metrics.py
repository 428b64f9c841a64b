"""IoU, recall and mass of rows constructed by hand."""

import pytest
import torch
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.evaluation.metrics import hash_quality, quality
from hashtrain.layers import BY_VARIANT
from hashtrain.training.target import attention, top_count


def test_quality_of_a_hand_computed_selection():
    p = torch.tensor([[[[0.5, 0.3, 0.1, 0.1, -1.0]]]])
    found = quality(p, torch.tensor([[[[0, 2]]]]), torch.tensor([2]))
    assert found.iou.item() == pytest.approx(1 / 3)
    assert found.recall.item() == 0.5
    torch.testing.assert_close(found.mass, torch.tensor([[[0.6 / 0.8]]]))


def test_perfect_selection_has_quality_one_and_unused_slots_do_not_count():
    p = torch.tensor([[[[0.5, 0.3, 0.2], [0.1, 0.9, -1.0]]]])
    found = quality(p, torch.tensor([[[[0, 1], [1, -1]]]]), torch.tensor([2, 1]))
    for values in found:
        torch.testing.assert_close(values, torch.ones(1, 1, 2))


def test_hash_quality_is_measured_on_the_selection_that_is_deployed():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 6, 64, generator=generator), torch.randn(1, 2, 100, 64, generator=generator)
    positions = torch.tensor([70, 75, 80, 85, 90, 99])
    layer = BY_VARIANT["lsh"](HasherConfig("lsh", ModelShape(1, 4, 2, 64)), torch.Generator().manual_seed(1))
    found = hash_quality(layer, q, k, positions, 0.1, 0.125)
    signs = lambda x: (x > 0).float() * 2 - 1  # noqa: E731
    keys = signs(k @ layer.rotation)
    scores = (signs(q.view(1, 2, 2, 6, 64) @ layer.rotation[:, None]).sum(2)) @ keys.transpose(-1, -2)
    p = attention(q, k, positions, 0.125)
    for head in range(2):
        for row, position in enumerate(positions.tolist()):
            count, others = top_count(position + 1, 0.1) - 5, range(1, position - 3)  # the others are always read
            seen, exact = scores[0, head, row], p[0, head, row]
            chosen = set(sorted(others, key=lambda i: (-seen[i].item(), i))[:count])
            target = set(sorted(others, key=lambda i: -exact[i].item())[:count])
            most = exact.topk(count + 5).values.sum()
            held = exact[[0, *range(position - 3, position + 1), *chosen]].sum()
            torch.testing.assert_close(found.mass[0, head, row], held / most)
            torch.testing.assert_close(found.iou[0, head, row].item(), len(chosen & target) / len(chosen | target))
