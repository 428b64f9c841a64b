"""Public classes are copied and pickled. Those that refuse: test_copies.py."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hashcore import BitIndex
from hashtrain import Hasher, HasherConfig, ModelShape, TrainConfig
from sparse_decode import Budget, HashSelector, LshSelector, OracleSelector, RecentSelector, Rows
from sparse_decode.budget import LayerBudget
from sparse_serve import Settings
from transformers import LlamaConfig

MODEL = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
SHAPE, BUDGET = ModelShape.of(MODEL), LayerBudget(0.2, dense_below=9)
HASHER = Hasher(HasherConfig("planes", SHAPE, bits=32, hidden=4))
VALUES = [Budget(0.1), BUDGET, HASHER.config, SHAPE, TrainConfig(steps=9), Settings("folder", BUDGET, (0,))]
OTHERS = [
    *(BitIndex.from_vectors(np.eye(9), keep="float16"), HASHER, HashSelector(HASHER, per_query_head=True)),
    *(LshSelector(MODEL), OracleSelector(per_query_head=True), RecentSelector()),
    Rows(1, *torch.ones(2, 1, 2, 3, 4), None, None, torch.ones(1, 3, dtype=torch.int64), 0.5),
]


def state(x):
    """What an object consists of, in values that compare."""
    if isinstance(x, torch.Tensor | np.ndarray):
        return x.tolist()
    if isinstance(x, list | tuple):
        return [*map(state, x)]
    if isinstance(x, dict):
        return {name: state(part) for name, part in x.items()}
    return (type(x), vars(x).keys(), state(x.__getstate__())) if hasattr(x, "__dict__") else x


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])  # noqa: S301
def test_copies_consist_of_the_same_and_values_equal_theirs(way):
    for made in (*VALUES, *OTHERS):
        assert state(way(made)) == state(made)
    assert [*map(way, VALUES)] == VALUES
