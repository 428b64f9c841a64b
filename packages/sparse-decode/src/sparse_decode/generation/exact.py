"""Exact mode: sparse steps of a model draft tokens, and a dense pass of the same model checks them, with one cache.

    1. draft   up to k sparse steps; then the drafted tokens are removed from the cache
    2. check   one dense pass over the last token and the drafted ones, which reads each key once
    3. accept  the longest prefix of drafts that the dense model agrees with, and one more token of its own

The loop is transformers' assisted decoding, with its acceptance rule for sampling, streaming and scores; we provide the
`CandidateGenerator`. The model is re-typed in place, so that `generate` runs that loop and callers' code is unchanged.
All other calls of the model are dense. A mark on the cache tells drafts from checks, because the cache is passed as an
argument: threads have their own caches.
"""

# The loop of transformers, and configs, have no types.
# pyright: reportUnknownMemberType=false

import copy
import functools
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.generation.candidate_generator import CandidateGenerator

from sparse_decode.caches.cache import CodedDynamicLayer
from sparse_decode.caches.growing import FROM, grow
from sparse_decode.costs.pace import Pace
from sparse_decode.generation.exact_refusals import require_drafts
from sparse_decode.interface import Hook, may_grow
from sparse_decode.layer.dense_step import MOST_ROWS
from sparse_decode.model import CACHE_NAMES
from sparse_decode.unselected.remainder import RunningMoments

MARK = "_drafted_by"
"""Attribute of a cache during drafting: the `Drafts` object that drafts."""


class Acceptance(NamedTuple):
    """Counts of drafted and accepted tokens."""

    checks: int
    """Dense passes that checked drafts, without prompts."""
    drafted: int
    """Drafted tokens."""
    accepted: int
    """Drafted tokens that the dense model confirmed."""

    @property
    def rate(self) -> float | None:
        """Accepted / drafted; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


class Drafts:
    """State shared by all generations of one attachment.

    Args: pace: creates what chooses how many tokens a generation drafts; prepare: makes a cache carry codes; summing:
        layers that add the remainder.
    """

    def __init__(self, pace: Callable[[], Pace], prepare: Callable[[Cache], object], summing: Collection[int]):
        self.pace: Callable[[], Pace] = pace
        self._prepare, self._summing = prepare, tuple(summing)
        self._lock = threading.Lock()
        self._counts = Acceptance(0, 0, 0)

    @property
    def acceptance(self) -> Acceptance:
        """Counts of drafted and accepted tokens so far."""
        return self._counts

    def reset(self) -> None:
        """Reset the counts."""
        with self._lock:
            self._counts = Acceptance(0, 0, 0)

    def count(self, drafted: int, accepted: int) -> None:
        """Add the result of a check."""
        with self._lock:
            before = self._counts
            self._counts = Acceptance(before.checks + 1, before.drafted + drafted, before.accepted + accepted)

    def has(self, cache: object) -> bool:
        """Whether tokens are being drafted with this cache."""
        return getattr(cache, MARK, None) is self

    @contextmanager
    def adding(self, cache: Cache, mask: Tensor | None = None) -> Generator[None]:
        """Make steps with a cache sparse in this context, and remove their tokens from it at the end.

        Args: mask: the visible tokens of the cache, 0 and 1, [1, T or more]; None for all.
        """
        self._prepare(cache)
        n, sums = cache.get_seq_length(), list[tuple[CodedDynamicLayer, RunningMoments]]()
        seen = None if mask is None else mask[:, :n].bool()
        for held in (cast(CodedDynamicLayer, cache.layers[layer]) for layer in self._summing):
            # Bring the sums up to date with the accepted tokens before copying them.
            held.moments.advance(cast(Tensor, held.keys), cast(Tensor, held.values), seen, n, held.device)
            sums.append((held, copy.copy(held.moments)))
        setattr(cache, MARK, self)
        try:
            yield
        finally:
            delattr(cache, MARK)
        for held, moments in sums:
            held.moments = moments
        cache.crop(n - cache.get_seq_length())


class Drafter(CandidateGenerator):
    """Drafts tokens for one generation: the candidate generator of transformers' loop.

    Args:
        settings: a private copy of the generation config. The loop truncates its output at `settings.max_length`. When
            a drafted token stops the text, `max_length` is set to that position, so that the dense token after it is
            dropped. Leaving the stop token out of the draft instead would change the distribution of samples.
        processors, criteria: logits processors and stopping criteria.
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
        """Whether drafting can save time anywhere in a text that starts with n tokens; else a plain loop is faster."""
        return self._pace.could(n) or self._pace.could(self._longest)

    def get_candidates(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, model_kwargs: dict[str, Any] | None = None, is_first_iteration: bool = False, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Draft tokens after input_ids [1, T].

        Returns: [1, T + drafted]; and, when sampling, the logits they were drawn from, [1, drafted, vocabulary].
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
        """Continue ids [1, T] by up to `most` tokens, or until a stopping criterion is met, as `generate` does."""
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
        """Record the result of a check, whose tokens are the last ones of input_ids [1, T]."""
        if self._drafted is None:  # the pass over the prompt
            return
        made = input_ids[0, self._start :][: len(self._drafted)]
        # A rejected token is never sampled in its own place: its probability there is zero.
        accepted = int((made == self._drafted[: len(made)]).long().cumprod(0).sum())
        self._pace.learn(len(self._drafted), accepted)
        self._drafts.count(len(self._drafted), accepted)


def exact_type(plain: type[PreTrainedModel], drafts: Drafts) -> type[PreTrainedModel]:
    """Return the class of a model in exact mode, whose `generate` drafts and checks.

    It has the name of the plain class, which is saved in files of the model.
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

    @functools.wraps(own.prepare_inputs_for_generation)  # transformers inspects its signature
    def prepare_inputs_for_generation(
        self: Any, input_ids: Tensor, *given: Any, next_sequence_length: int | None = None, **inputs: Any
    ) -> Any:
        cache = inputs.get("past_key_values")
        if next_sequence_length is None and isinstance(cache, Cache) and (n := cache.get_seq_length()) > 0:
            next_sequence_length = input_ids.shape[1] - n  # the loop passes the whole prompt even if a part is cached
        return own.prepare_inputs_for_generation(
            self, input_ids, *given, next_sequence_length=next_sequence_length, **inputs
        )

    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    functions = _sample, _get_candidate_generator, prepare_inputs_for_generation
    refused = {name: _refused(way) for name, way in OTHER_WAYS.items()}
    return type(plain.__name__, (plain,), {**names, **{f.__name__: f for f in functions}, **refused})


OTHER_WAYS = {"_assisted_decoding": "another assistant", "_beam_search": "beam search"}
"""Decoding methods of transformers that exact mode does not support, by the method that implements them."""


def _refused(way: str) -> Callable[..., Any]:
    def method(self: Any, *given: Any, **named: Any) -> Any:
        raise ValueError(
            f"exact mode supports greedy decoding and sampling only, got {way}; omit it, or call detach() first"
        )

    return method


def retype(model: PreTrainedModel, drafts: Drafts) -> Callable[[], None]:
    """Make a model's `generate` draft and check. Returns: a function that restores the model's class."""
    plain = type(model)
    exact = model.__class__ = exact_type(plain, drafts)

    def undo() -> None:
        if type(model) is exact:
            model.__class__ = plain

    return undo


class ExactHook(Hook):
    """The hook of exact mode: sparse while tokens are drafted with a cache, dense otherwise.

    Args: drafting: whether tokens are being drafted with a cache; grows: makes the dense layers of a cache grow in
        place; the others as in `Hook`.
    """

    __slots__ = ("_drafting", "_grows")

    def __init__(self, *given: Any, drafting: Callable[[object], bool], grows: Callable[[object], None]):
        super().__init__(*given, may_be_short=False)
        self._drafting, self._grows = drafting, grows

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs} if args else kwargs
        cache = given.get(CACHE_NAMES[0])
        if self._drafting(cache):
            return super().__call__(module, args, kwargs)
        self._require_ours(kwargs)
        hidden = given.get("hidden_states")
        if type(cache) is not DynamicCache or hidden is None or self._layer >= len(cache.layers):
            return None
        held: Any = cache.layers[self._layer]
        keys: Any = held.keys if type(held) is DynamicLayer and held.is_initialized else None
        if keys is None or not keys.numel() or hidden.shape[1] > MOST_ROWS:
            return None
        if keys.shape[2] >= FROM and may_grow(hidden):
            grow(held, self._growing)
            self._grows(cache)
        return None
