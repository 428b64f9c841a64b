"""Logits of many rows, computed a piece at a time: whole, those of 128K rows over 128K tokens would take 32 GB."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from hashtrain.models import text_decoder
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from evals.metrics import mean_kl, token_losses

PIECE_BYTES = 1 << 26
"""Most bytes of logits that exist at once, in the model's type; a single row may take more."""


class RowLogits:
    """The logits of rows whose last hidden states are known.

    Args:
        model: the model that made them. What it does after its decoder (projection, scaling, soft-capping) it does
            again for each piece.
        states: last hidden states [R, H].
        kind: class of what the model's decoder returns.
    """

    def __init__(self, model: PreTrainedModel, states: Tensor, kind: type[ModelOutput]):
        self._model = model
        self._states = states
        self._kind = kind

    def __len__(self) -> int:
        return len(self._states)

    def pieces(self) -> Iterator[slice]:
        """Yield consecutive rows whose logits take at most `PIECE_BYTES`, at least one row each."""
        config: Any = self._model.config
        width = int(config.get_text_config(decoder=True).vocab_size) * self._states.element_size()
        most = max(1, PIECE_BYTES // width)
        for first in range(0, len(self), most):
            yield slice(first, min(first + most, len(self)))

    def at(self, rows: slice) -> Tensor:
        """Compute the logits of some rows, [r, V], in the model's type."""
        states = self._states[rows]
        ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        with _returning(text_decoder(self._model), self._kind(last_hidden_state=states[None])):
            return self._model(ids, use_cache=False).logits[0]

    def mean_loss(self, targets: Tensor) -> float:
        """Return the mean negative log-probability of each row's target, int64 [R], in nats."""
        return torch.cat([token_losses(self.at(rows), targets[rows]) for rows in self.pieces()]).mean().item()

    def compare(self, other: "RowLogits", targets: Tensor) -> tuple[float, float]:
        """Return the other rows' mean loss, and the mean of KL(these || those), in nats.

        Args: targets: int64 [R].
        """
        losses: list[Tensor] = []
        divergence = 0.0
        for rows in self.pieces():
            found = other.at(rows)
            losses.append(token_losses(found, targets[rows]))
            divergence += mean_kl(self.at(rows), found) * len(found)
        return torch.cat(losses).mean().item(), divergence / len(self)


def row_logits(model: PreTrainedModel, ids: Tensor, rows: slice, **how: Any) -> RowLogits:
    """Run a model over ids [1, T] and return the logits of some of these rows, to be computed later.

    Args: how: as the model takes it, such as `past_key_values`.
    """
    kept: list[RowLogits] = []

    def keep(decoder: object, given: object, out: Any) -> None:
        states = cast(Tensor, out.last_hidden_state)[0, rows].clone()  # a view would keep all rows
        kept.append(RowLogits(model, states, type(out)))

    hook = text_decoder(model).register_forward_hook(keep)
    try:
        model(ids, logits_to_keep=1, **how)
    finally:
        hook.remove()
    return kept[-1]


@contextlib.contextmanager
def _returning(decoder: PreTrainedModel, out: ModelOutput) -> Iterator[None]:
    """Let a decoder return `out`, whatever it is given."""
    own = vars(decoder).get("forward")  # accelerate sets one to move weights

    def forward(*arguments: object, **options: object) -> ModelOutput:
        return out

    vars(decoder)["forward"] = forward
    try:
        yield
    finally:
        del vars(decoder)["forward"]
        if own is not None:
            vars(decoder)["forward"] = own
