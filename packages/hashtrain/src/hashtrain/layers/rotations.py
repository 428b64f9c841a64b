"""Signs of one matrix per KV head, shared by its queries: a random rotation, or a trained one."""

import hashcore
from torch import Tensor, nn

from hashtrain.config import HasherConfig
from hashtrain.layers.base import Draw, LayerHasher, rotations
from hashtrain.layers.surrogate import softsign


class Lsh(LayerHasher):
    """A random rotation, untrained."""

    rotation: Tensor

    def __init__(self, config: HasherConfig, generator: Draw):
        super().__init__(config)
        self._keep(rotations(self.hkv, self.d, self.bits, generator))

    def _keep(self, rotations: Tensor) -> None:
        self.register_buffer("rotation", rotations)

    def encode_keys(self, k: Tensor, per_query_head: bool = False) -> Tensor:
        codes = hashcore.pack(k.float() @ self.rotation)
        return codes.repeat_interleave(self.group, 1) if per_query_head else codes

    def encode_queries(self, q: Tensor, per_query_head: bool = False) -> tuple[Tensor, tuple[int, ...]]:
        codes = hashcore.pack(self.by_group(q.float()) @ self.rotation[:, None])  # [B, Hkv, G, T, W]
        if per_query_head:
            return codes.flatten(1, 2).unsqueeze(-2), (1,)
        return hashcore.group_planes(codes.transpose(2, 3))


class Linear(Lsh):
    """A trained matrix, started as a rotation: the best linear hash function (the paper's "LSH, after")."""

    def _keep(self, rotations: Tensor) -> None:
        self.rotation: Tensor = nn.Parameter(rotations)

    def soft_queries(self, q: Tensor) -> Tensor:
        return softsign(self.by_group(q.float()) @ self.rotation[:, None]).mean(2)

    def soft_keys(self, k: Tensor) -> Tensor:
        return softsign(k.float() @ self.rotation)
