"""Exact mode: the sparse model drafts tokens, the same model checks them dense, over one cache.

    1. draft   up to k sparse steps, each one token behind the last; then the cache forgets them
    2. check   one dense pass over the last token and the drafted ones: each key is read once for all of them
    3. accept  the first drafted tokens that the dense model makes, too, and one more of its own; the cache keeps those

The loop is transformers' own for assisted decoding, with its acceptance rule for sampling, streaming and scores. Ours
is what drafts: a `CandidateGenerator`. The model is re-typed in place, so that `generate` runs that loop, and nothing
that a caller writes changes; every other call of the model is dense. What tells a draft from a check is a mark on the
cache, which travels with the arguments: threads have caches of their own.
"""

# The loop of transformers, and configs, have no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.candidate_generator import CandidateGenerator

from sparse_decode.cache import CodedDynamicLayer
from sparse_decode.exact_refusals import require_drafts
from sparse_decode.pace import Pace
from sparse_decode.remainder import RunningMoments

MARK = "_drafted_by"
"""Attribute of a cache that drafts are being added to: whose they are."""


class Acceptance(NamedTuple):
    """What checks made of drafted tokens."""

    checks: int
    """Dense passes, prompts not among them."""
    drafted: int
    """Tokens that they were given."""
    accepted: int
    """Tokens among these that the dense model made, too."""

    @property
    def rate(self) -> float | None:
        """Accepted over drafted; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


class Drafts:
    """What the generations of one attachment share.

    Args:
        pace: makes what chooses how many tokens one generation drafts.
        prepare: makes a cache carry codes; summing: layers that add what a selection leaves out.
    """

    def __init__(self, pace: Callable[[], Pace], prepare: Callable[[Cache], object], summing: Collection[int]):
        self.pace: Callable[[], Pace] = pace
        self._prepare, self._summing = prepare, tuple(summing)
        self._lock = threading.Lock()
        self._counts = Acceptance(0, 0, 0)

    @property
    def acceptance(self) -> Acceptance:
        """What checks made of drafted tokens so far."""
        return self._counts

    def reset(self) -> None:
        """Start counting anew."""
        with self._lock:
            self._counts = Acceptance(0, 0, 0)

    def count(self, drafted: int, accepted: int) -> None:
        """Count a check."""
        with self._lock:
            before = self._counts
            self._counts = Acceptance(before.checks + 1, before.drafted + drafted, before.accepted + accepted)

    def has(self, cache: object) -> bool:
        """Whether drafts are being added to a cache."""
        return getattr(cache, MARK, None) is self

    @contextmanager
    def adding(self, cache: Cache, mask: Tensor | None = None) -> Generator[None]:
        """Make steps with a cache sparse, and let it forget what they add to it.

        Args: mask: which of its tokens are seen, [1, T] of 0 and 1 or more of them; None for all.
        """
        self._prepare(cache)
        n, sums = cache.get_seq_length(), list[tuple[CodedDynamicLayer, RunningMoments]]()
        seen = None if mask is None else mask[:, :n].bool()
        for held in (cast(CodedDynamicLayer, cache.layers[layer]) for layer in self._summing):
            # Of the tokens that are here to stay.
            held.moments.advance(cast(Tensor, held.keys), cast(Tensor, held.values), seen, n, held.device)
            sums.append((held, held.moments.copied()))
        setattr(cache, MARK, self)
        try:
            yield
        finally:
            delattr(cache, MARK)
        for held, moments in sums:
            held.moments = moments
        cache.crop(n - cache.get_seq_length())


class Drafter(CandidateGenerator):
    """Drafts for one generation: what transformers' loop asks for candidates.

    Args:
        settings: a copy of the generation's settings for this alone. The loop cuts what a check made at its
            `max_length`, which therefore says each time where a drafted token would stop the text: the dense token
            behind it must not be kept. Leaving that token out of the draft would bend the distribution of samples.
        processors, criteria: what changes logits, and what stops the text.
    """

    requires_model_outputs = True
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: PreTrainedModel, drafts: Drafts, settings: Any, processors: Any, criteria: Any):
        self._model: Any = model
        self._drafts, self._pace = drafts, drafts.pace()
        self._settings, self._longest = settings, cast(int, settings.max_length)
        self._processors, self._criteria = processors, criteria
        self._start, self._drafted = 0, None

    def may_draft(self, n: int) -> bool:
        """Whether a draft can pay anywhere in a text that begins with n tokens; if not, a plain loop is quicker."""
        return self._pace.could(n) or self._pace.could(self._longest)

    def get_candidates(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, model_kwargs: dict[str, Any] | None = None, is_first_iteration: bool = False, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Draft behind input_ids [1, T].

        Returns: [1, T + drafted], and, when sampling, the logits that they were drawn by, [1, drafted, vocabulary].
        """
        self._settings.max_length = self._longest
        self._start = n = input_ids.shape[1]
        self._drafted = None if is_first_iteration else input_ids[0, n:]
        most = 0 if is_first_iteration else min(self._pace.next(n), self._longest - n - 1)
        if most < 1:
            return input_ids, None
        inputs = cast("dict[str, Any]", model_kwargs)
        with self._drafts.adding(inputs["past_key_values"], inputs.get("attention_mask")):
            ids, logits = self._draft(input_ids, inputs, most)
        self._drafted = ids[0, n:]
        return ids, torch.stack(logits, 1) if self._settings.do_sample else None

    def _draft(self, ids: Tensor, inputs: dict[str, Any], most: int) -> tuple[Tensor, list[Tensor]]:
        """Go on with ids [1, T] for so many tokens, or until they stop the text, as `generate` does."""
        model, logits, inputs = self._model, list[Tensor](), copy.copy(inputs)
        for _ in range(most):
            given = model.prepare_inputs_for_generation(ids, next_sequence_length=1, is_first_iteration=False, **inputs)
            made = model(**given, return_dict=True)
            logits.append(self._processors(ids, made.logits[:, -1].to(torch.float32, copy=True)))
            if self._settings.do_sample:
                token = torch.multinomial(logits[-1].softmax(-1), 1)
            else:
                token = logits[-1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, token.to(ids.device)], -1)
            if bool(self._criteria(ids, None).all()):
                self._settings.max_length = ids.shape[1]
                break
            inputs = model._update_model_kwargs_for_generation(made, inputs)
        return ids, logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Take notice of a check: its tokens are the last of input_ids [1, T]."""
        if self._drafted is None:  # that was the prompt
            return
        made = input_ids[0, self._start :][: len(self._drafted)]
        # A refused token is never made again in its place: what is drawn instead has no chance of being it.
        accepted = int((made == self._drafted[: len(made)]).long().cumprod(0).sum())
        self._pace.learn(len(self._drafted), accepted)
        self._drafts.count(len(self._drafted), accepted)


def exact_type(plain: type[PreTrainedModel], drafts: Drafts) -> type[PreTrainedModel]:
    """Make the class that a model has while it is attached: `generate` drafts and checks.

    Its name is the plain one's, which files of the model hold.
    """
    own: Any = plain

    def _sample(
        self: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> Any:
        require_drafts(input_ids, generation_config, inputs)
        settings = copy.copy(generation_config)
        drafter = Drafter(self, drafts, settings, logits_processor, stopping_criteria)
        if not drafter.may_draft(input_ids.shape[1]):
            return own._sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **inputs)
        rest = logits_processor, stopping_criteria, settings
        return own._assisted_decoding(self, input_ids, *rest, assistant_model=drafter, **inputs)

    def _get_candidate_generator(self: Any, *given: Any, assistant_model: Any = None, **named: Any) -> Any:
        return assistant_model

    @functools.wraps(own.prepare_inputs_for_generation)  # transformers looks at its signature
    def prepare_inputs_for_generation(
        self: Any, input_ids: Tensor, *given: Any, next_sequence_length: int | None = None, **inputs: Any
    ) -> Any:
        cache = inputs.get("past_key_values")
        if next_sequence_length is None and isinstance(cache, Cache) and (n := cache.get_seq_length()) > 0:
            next_sequence_length = input_ids.shape[1] - n  # the loop gives a prompt whole, whatever the cache has
        return own.prepare_inputs_for_generation(
            self, input_ids, *given, next_sequence_length=next_sequence_length, **inputs
        )

    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    functions = _sample, _get_candidate_generator, prepare_inputs_for_generation
    refused = {name: _refused(way) for name, way in OTHER_WAYS.items()}
    return type(plain.__name__, (plain,), {**names, **{f.__name__: f for f in functions}, **refused})


OTHER_WAYS = {"_assisted_decoding": "another assistant", "_beam_search": "beam search"}
"""Ways of transformers to decode that are not ours, by the method that does them."""


def _refused(way: str) -> Callable[..., Any]:
    def method(self: Any, *given: Any, **named: Any) -> Any:
        raise ValueError(
            f"exact mode is greedy or samples, by drafts of its own, got {way}; leave that out, or call detach() first"
        )

    return method


def retype(model: PreTrainedModel, drafts: Drafts) -> Callable[[], None]:
    """Make a model's `generate` draft and check. Returns: what makes the model's class what it was."""
    plain = type(model)
    exact = model.__class__ = exact_type(plain, drafts)

    def undo() -> None:
        if type(model) is exact:
            model.__class__ = plain

    return undo
