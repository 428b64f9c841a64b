"""The loss of a layer's hash functions on sampled pairs of tokens (docs/algorithm.md, eq. 10 and 17)."""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

import torch
from torch import Tensor

from hashtrain.layers import LayerHasher
from hashtrain.training.loss import ranking_loss, reconstruction_loss, squared_error
from hashtrain.training.target import Pairs
from hashtrain.training.train_config import TrainConfig


def pair_loss(hasher: LayerHasher, q: Tensor, k: Tensor, pairs: Pairs, scaling: float, config: TrainConfig) -> Tensor:
    """Compute the loss that a config names on a layer's scores of sampled tokens: a scalar.

    Args: q: queries of the rows, [B, Hq, R, D]; k: all keys, [B, Hkv, T, D]; scaling: of the model's attention.
    """
    top, rest = pair_scores(hasher, q, k, pairs, config.precision)
    if config.loss == "ranking":
        slope = config.beta * (scaling if hasher.estimates_products else 1.0)
        return ranking_loss(top, rest, pairs.valid, slope, config.alpha)
    heads, valid = top.shape[1], torch.cat([torch.ones_like(top, dtype=torch.bool), pairs.valid], -1)
    exact = (hasher.by_group(q.float()).sum(2) if heads == hasher.hkv else q.float()) @ k.float().repeat_interleave(
        heads // hasher.hkv, 1
    ).mT
    at = torch.cat([pairs.top, pairs.rest.expand(*pairs.valid.shape)], -1)
    rebuilt = squared_error if config.loss == "mse" else reconstruction_loss
    return rebuilt(torch.cat([top, rest], -1), exact.gather(-1, at), valid)


def pair_scores(
    hasher: LayerHasher, q: Tensor, k: Tensor, pairs: Pairs, precision: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Score the sampled tokens; only their keys are hashed, not the whole context's.

    Args:
        q: queries of the rows, [B, Hq, R, D]; k: all keys, [B, Hkv, T, D].
        precision: see `TrainConfig`.
    Returns: differentiable scores of `pairs.top` [B, H, R, A] and of `pairs.rest` [B, H, R, C], in the units given by
        `LayerHasher.estimates_products`.
    """
    batch, heads, rows, drawn = pairs.top.shape
    hkv, dim = k.shape[1], k.shape[-1]  # target heads of a group share keys
    index = pairs.top.reshape(batch, hkv, -1, 1).expand(-1, -1, -1, dim)
    tops = k.gather(2, index).view(batch, heads, -1, dim)
    others = k.index_select(2, pairs.rest).repeat_interleave(heads // hkv, 1)
    with torch.autocast(q.device.type, torch.bfloat16, enabled=precision == "bf16"):
        found = hasher.soft_queries(q), hasher.soft_keys(tops), hasher.soft_keys(others)
    queries, top, rest = (x.float() for x in found)  # bfloat16 cannot count 257 bits
    top = top.view(batch, heads, rows, drawn, -1)
    return (top @ queries[..., None]).squeeze(-1), queries @ rest.transpose(-1, -2)
