"""A language model for lm-evaluation-harness with one of our methods as its attention.

`SparseLM` is the harness's own Hugging Face model, with the method attached around each call. Requests of equal length
run together, so no pass is padded, every pass has one row from which on it is sparse, and the measured density counts
only tokens of requests.
"""

import contextlib
import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from lm_eval.models.huggingface import HFLM
from sparse_decode import Budget
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evals.attending import Attended, attending
from evals.methods import LoadedMethod
from evals.settings import ALWAYS, Always
from evals.tasks.benchmark_settings import SparseRows, Truncation

Key = TypeVar("Key", bound=Hashable)
TokenRequest = tuple[Any, list[int], list[int]]
"""A request of the harness: its own key, the context's tokens, the continuation's tokens."""


_HFLM: Any = HFLM  # an untyped decorator hides its members behind the abstract `LM`


class SparseLM(_HFLM):
    """A causal language model with a method's attention.

    Args:
        model, tokenizer: as loaded; the model belongs to the caller and is dense again after every call.
        method: dense attention if it has no selector.
        budget: tokens per row.
        always: layers that stay dense, and tokens that every row reads, for any method.
        sparse_rows: "all", or "continuation": the row that predicts the first token of a continuation or an answer,
            and all rows after it; rows before it are dense.
        batch_size: requests of equal length in one batch.
        truncation_side: the part of a prompt dropped if it is too long to generate from, its "middle" or its "left".
        max_length: most tokens of a pass; None: as many as the model takes.
    Attributes:
        attended: tokens that the sparse rows of all requests attended to, and that were visible.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        method: LoadedMethod,
        budget: Budget,
        *,
        always: Always = ALWAYS,
        sparse_rows: SparseRows = "continuation",
        batch_size: int = 8,
        truncation_side: Truncation = "left",
        max_length: int | None = None,
    ):
        own: dict[str, Any] = {"backend": "causal", "batch_size": batch_size, "max_length": max_length}
        logger = logging.getLogger(HFLM.__module__)
        logger.disabled = True  # it warns that the model is already loaded
        super().__init__(pretrained=model, tokenizer=cast(Any, tokenizer), **own)
        logger.disabled = False
        self.method: LoadedMethod = method
        self.budget: Budget = budget
        self.always: Always = always
        self.sparse_rows, self.truncation_side = sparse_rows, truncation_side
        self.attended: Attended = Attended()

    @contextlib.contextmanager
    def _attending(self, start: int) -> Iterator[None]:
        """Attach the method inside the block, from the row that predicts the continuation on, or in all rows."""
        prompt = start if self.sparse_rows == "continuation" else None
        how = self.method, self.budget, self.always, prompt
        with attending(cast(PreTrainedModel, self.model), *how) as attended:
            yield
        self.attended.selected += attended.selected
        self.attended.visible += attended.visible

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score continuations: (sum of the tokens' log-probabilities in nats, whether all were the most likely)."""
        passes = [self._pass(len(context), len(continuation)) for _, context, continuation in requests]
        answers: dict[int, tuple[float, bool]] = {}
        for (_, start), members in _alike(passes).items():
            with self._attending(start):
                found = super()._loglikelihood_tokens([requests[i] for i in members], True, override_bs)
            answers.update(zip(members, found, strict=True))
        return [answers[i] for i in range(len(requests))]

    def _pass(self, context: int, continuation: int) -> tuple[int, int]:
        """Return the number of rows of a request's pass, and the row that predicts its first token."""
        # The last token predicts nothing; contexts too long for the model are truncated on the left.
        rows = min(context + continuation, self.max_length + 1) - 1
        return rows, rows - continuation

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], *, attention_mask: Tensor, **options: Any
    ) -> Tensor:
        """Generate from a left-padded batch [B, T]: the same tokens, what follows them, and padding on the right."""
        room, width = max_length - context.shape[1], context.shape[1]
        out = context.new_full((len(context), max_length), cast(int, self.tokenizer.pad_token_id))
        out[:, :width] = context
        for length, members in _alike(attention_mask.sum(-1).tolist()).items():
            alone = context[members, -length:]
            with self._attending(length - 1), torch.no_grad():
                mask = torch.ones_like(alone)
                found = super()._model_generate(alone, length + room, stop, attention_mask=mask, **options)
            written = found[:, length:]
            out[members, width : width + written.shape[1]] = written
        return out

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Encode prompts, padded to one length [B, T], and their mask. With truncation_side "middle", prompts beyond
        the limit lose their middle here; the harness truncates any remaining excess on the left."""
        if self.truncation_side == "middle" and left_truncate_len:
            strings = [self._without_middle(text, left_truncate_len) for text in strings]
        return super().tok_batch_encode(strings, padding_side, left_truncate_len, truncation)

    def _without_middle(self, text: str, limit: int) -> str:
        """Keep the first and the last half of the limit, as LongBench's own script does."""
        limit -= cast(PreTrainedTokenizerBase, self.tokenizer).num_special_tokens_to_add()
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) <= limit:
            return text
        return "".join(str(self.tokenizer.decode(part)) for part in (ids[: limit // 2], ids[-(limit // 2) :]))


def _alike(keys: Sequence[Key]) -> dict[Key, list[int]]:
    """Group the positions of equal keys."""
    found: dict[Key, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return found
