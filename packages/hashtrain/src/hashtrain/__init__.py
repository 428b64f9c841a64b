"""Hashers, which turn queries and keys into bit codes, and their training."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from hashtrain.lazy import export

if TYPE_CHECKING:
    from hashtrain.config import HasherConfig, ModelShape
    from hashtrain.hasher import Hasher
    from hashtrain.loss import ranking_loss
    from hashtrain.target import top_count
    from hashtrain.trainer import TrainConfig, train_layer

export(
    __name__,
    {
        "config": ("HasherConfig", "ModelShape"),
        "hasher": ("Hasher",),
        "loss": ("ranking_loss",),
        "target": ("top_count",),
        "trainer": ("TrainConfig", "train_layer"),
    },
)
__version__ = version("hashtrain")
__all__ = ["Hasher", "HasherConfig", "ModelShape", "TrainConfig", "ranking_loss", "top_count", "train_layer"]
