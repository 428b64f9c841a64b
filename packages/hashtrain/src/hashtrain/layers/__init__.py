"""One layer's hash functions, one class per variant (docs/algorithm.md, Variants)."""

import torch

from hashtrain.config import HasherConfig
from hashtrain.layers.base import REMAINDER_TERMS, LayerHasher, rotation
from hashtrain.layers.paper import Paper
from hashtrain.layers.planes import Planes
from hashtrain.layers.rotations import Linear, Lsh
from hashtrain.layers.transform import Transform

BY_VARIANT: dict[str, type[Lsh | Linear | Paper | Planes | Transform]] = {
    "lsh": Lsh,
    "linear": Linear,
    "paper": Paper,
    "planes": Planes,
    "transform": Transform,
}

__all__ = ["BY_VARIANT", "REMAINDER_TERMS", "LayerHasher", "rotation", "shapes"]


def shapes(config: HasherConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of one layer, allocating none; used to check a file before loading it."""
    with torch.device("meta"):
        made = BY_VARIANT[config.variant](config, None)
    return {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
