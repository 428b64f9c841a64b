"""Statistics of the bits of codes, for codes constructed by hand."""

import hashcore
import pytest
import torch
from hashtrain.config import SINK
from hashtrain.evaluation.evaluate import bit_statistics


class Given:
    """A hasher with these bits as its codes, [1, H, T, bits]."""

    remainder = torch.zeros(1)

    def __init__(self, bits):
        self.bits = bits

    def encode_keys(self, k):
        return hashcore.pack(self.bits[:, :, -k.shape[2] :].float())


def statistics(bits):
    """Of these bits, behind a first token of other bits, which every row reads without a search."""
    first = torch.ones_like(bits[:, :, :SINK])
    return bit_statistics(Given(torch.cat([first, bits], 2)), torch.zeros(1, 1, SINK + bits.shape[2], 1))


def test_ones_and_balance_of_known_shares():
    bits = torch.zeros(1, 1, 8, 32)
    bits[0, 0, :2, 0] = 1  # a quarter of the keys
    bits[0, 0, :, 1] = 1
    found = statistics(bits)
    assert found["ones"] == [0.0] * 30 + [0.25, 1.0]
    assert found["balance"] == pytest.approx(2 * 0.25 / 32)


def test_correlation_of_copies_opposites_and_independent_bits():
    independent = torch.stack([(torch.arange(32) >> bit) & 1 for bit in range(5)], -1).float()  # [32, 5]
    assert statistics(independent.repeat(1, 7)[None, None, :, :32])["correlation"] > 0.1
    mixed = torch.zeros(1, 1, 32, 32)
    mixed[0, 0, :, 0] = independent[:, 0]
    mixed[0, 0, :, 1] = 1 - independent[:, 0]  # the opposite is as redundant as a copy
    mixed[0, 0, :, 2] = independent[:, 3]
    assert statistics(mixed)["correlation"] == pytest.approx(2 / (32 * 31), rel=1e-4)
