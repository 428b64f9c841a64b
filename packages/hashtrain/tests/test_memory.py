"""The memory of a training step: measured on a small shape, bounded on a large one."""

import weakref

import pytest
import torch
from hashtrain import HasherConfig, ModelShape, TrainConfig
from hashtrain.layers import BY_VARIANT
from hashtrain.run.estimate import step_bytes
from hashtrain.training.trainer import Training
from hashtrain_runs import Whole
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LLAMA_3_8B = ModelShape(32, 32, 8, 128)
SMALL, CONTEXT = ModelShape(2, 8, 2, 32), 1024


class Peak(TorchDispatchMode):
    """Tracks the bytes of all live tensors created by operations."""

    def __init__(self):
        super().__init__()
        self.alive, self.most, self.seen = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage):
        if storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.alive += storage.nbytes()
            self.most = max(self.most, self.alive)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key, size):
        self.seen.discard(key)
        self.alive -= size


class Contexts(Whole):
    """One context of random queries and keys."""

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.q = torch.randn(1, 8, CONTEXT, 32, generator=draw).bfloat16()
        self.k = torch.randn(1, 2, CONTEXT, 32, generator=draw).bfloat16()

    def __len__(self):
        return 1

    def read(self, context, layer):
        return self.q, self.k, 32**-0.5


@pytest.mark.parametrize("variant", ["planes", "paper"])
def test_a_step_takes_no_more_than_the_bound_and_more_rows_take_no_more_attention(variant):
    config = HasherConfig(variant, SMALL, bits=64, hidden=64)
    peaks = {}
    for rows in (32, 128):
        layer = BY_VARIANT[variant](config, torch.Generator().manual_seed(0))
        settings = TrainConfig(steps=1, rows=rows, chunk=32, max_top=8, max_rest=128, min_position=64)
        training = Training(layer, 0, Contexts(), settings)
        with Peak() as peak:
            training.run()
        bound = step_bytes(config, settings, CONTEXT)
        assert bound / 4 < peak.most < bound
        peaks[rows] = peak.most
    assert peaks[128] < 1.5 * peaks[32]


@pytest.mark.parametrize("variant", ["planes", "paper"])
def test_llama_3_8b_at_8k_fits_16_gb_with_a_wide_margin(variant):
    config = HasherConfig(variant, LLAMA_3_8B, hidden=256)
    assert step_bytes(config, TrainConfig(), 8192) < 1.2e9
    assert step_bytes(config, TrainConfig(rows=1024), 8192) < 2e9
