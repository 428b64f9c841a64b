"""Hashers, which turn queries and keys into bit codes, and their training."""

from typing import TYPE_CHECKING

from hashtrain.lazy import export

if TYPE_CHECKING:
    from hashtrain.config import HasherConfig, ModelShape
    from hashtrain.hasher import Hasher
    from hashtrain.training.loss import ranking_loss
    from hashtrain.training.target import top_count
    from hashtrain.training.train_config import TrainConfig
    from hashtrain.training.trainer import train_layer

export(
    __name__,
    {
        "config": ("HasherConfig", "ModelShape"),
        "hasher": ("Hasher",),
        "training.loss": ("ranking_loss",),
        "training.target": ("top_count",),
        "training.train_config": ("TrainConfig",),
        "training.trainer": ("train_layer",),
    },
)
__version__ = "2.0.0"
__all__ = ["Hasher", "HasherConfig", "ModelShape", "TrainConfig", "ranking_loss", "top_count", "train_layer"]
