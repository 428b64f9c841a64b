"""Any call of a sparse layer: prompts, masks, static caches, compiled graphs, and steps with options.

What cannot be sparse is refused; the rows that need not be are dense; the others go through the layer's plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer
from transformers.utils.output_capturing import _active_collector

from sparse_decode.attend_inputs import require
from sparse_decode.blocks import AttentionArgs
from sparse_decode.cache import CodedDynamicLayer, CodedStaticLayer
from sparse_decode.dense_step import Output, attend_densely, with_means
from sparse_decode.growing import GrowingLayer
from sparse_decode.model import NAMES
from sparse_decode.modes import autocasts, no_autocast, readable
from sparse_decode.offload import HostLayer
from sparse_decode.opaque import attend_step
from sparse_decode.plan import LayerPlan, trim
from sparse_decode.positions import visible_rows
from sparse_decode.select import HashSelector
from sparse_decode.static_moments import StaticMoments

_SEES_NOTHING = (
    "a row of the mask sees no token, for which eager attention reads all values, here in host memory; load the model "
    'with attn_implementation="sdpa"'
)
Held = CacheLayerMixin | None
"""A layer of a cache; None if the model was called without one."""


def codes_of(plan: LayerPlan, held: Held, k: Tensor) -> Tensor | None:
    """Return the codes of the cached keys k [B, Hkv, N, D]: from the cache, or hashed now if there is no cache."""
    if not plan.selector.needs_codes:
        return None
    if held is None:
        return plan.encoder(k)
    codes: Tensor = held.codes  # pyright: ignore[reportAttributeAccessIssue]
    if codes.shape[2] != k.shape[2]:
        raise ValueError(
            f"the cache must carry a code for each of its {k.shape[2]} keys, got {codes.shape[2]}; change its keys "
            "only through its methods"
        )
    return codes


def _encoded(
    plan: LayerPlan, held: Held, q: Tensor, k: Tensor
) -> tuple[Tensor | None, tuple[Tensor, tuple[int, ...]] | None]:
    """Return `codes_of`, and the planes of a step's queries q [B, Hq, 1, D] on a GPU if hashed with the new key."""
    selector, planes = plan.selector, None
    if not isinstance(held, CodedDynamicLayer) or not isinstance(selector, HashSelector):
        return codes_of(plan, held, k), None
    if q.shape[2] > 1 or readable(q) or held.encoder is not plan.encoder or held.encoder.lists:
        return codes_of(plan, held, k), None
    room, missing = held.room_for_code()
    if missing:
        n = k.shape[2]
        planes = selector.encode_step(plan.layer, k[:, :, n - 1 :], room[:, :, n - 1 : n], q)
    if planes is not None:
        held.wrote_code()
    return codes_of(plan, held, k), planes


def _first_words(held: Held, codes: Tensor | None) -> Tensor | None:
    """Return the cache's copy of the first words of codes [B, H, N, W], [B, H, N]; None if it has none."""
    words: Tensor | None = None if codes is None else getattr(held, "first_words", None)
    return None if words is None or codes is None else words[:, :, : codes.shape[2]]


def attend(
    module: Any,
    plan: LayerPlan,
    held: Held,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    factor: float,
    kwargs: dict[str, Any],
) -> Output:
    """Attend, sparsely in the rows that the plan makes sparse.

    Args: those of `interface.attention`; held: the layer of the cache; factor: on the logits.
    Raises: ValueError if the call cannot be sparse, now or in a later step.
    """
    # A static cache returns its whole buffers; its length is a tensor, which a compiled graph must not read.
    length = held.cumulative_length if isinstance(held, StaticLayer) else None
    compiling = torch.compiler.is_compiling()
    whole = length is None or compiling or _all_room(plan, held, query, key, mask)
    end = key.shape[2] if whole else int(cast(Tensor, length))

    def dense() -> Output:
        kv = held.all_on(query.device) if isinstance(held, HostLayer) else (key, value)
        return attend_densely(module, query, *kv, mask, dropout, factor, **kwargs)

    sparse_call = plan.rule.may_be_sparse(query.shape[2], end)
    one_way = getattr(module, "is_causal", True) or mask is not None or query.shape[2] == 1
    _refuse(kwargs if one_way else {**kwargs, "is_causal": False}, dropout, sparse_call)
    mask = _as_wide(mask, query, key)
    if not compiling:
        _require_serves(module, plan, held, query, key, value, mask)
        if held is not None:
            _weights_wanted(module, plan, kwargs)  # refuses at prefill what a later step could not return
    if not sparse_call:
        _learn(plan, held, key, value, mask, length, factor)
        return dense()
    if autocasts(query.device):  # cast as torch's own attention does
        host = isinstance(held, HostLayer)  # its keys and values keep their dtype
        kind = key.dtype if host else torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(kind) for x in (query, key, value))
    if compiling:
        return _compiled(plan, held, query, key, value, mask, length, factor, kwargs), None
    with no_autocast(query.device):
        return _sparse(module, plan, held, query, key, value, mask, length, whole, factor, kwargs, dense)


def _compiled(
    plan: LayerPlan,
    held: Held,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    length: Tensor | None,
    factor: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """Run a call that may contain a sparse row inside a compiled graph: [B, Q, Hq, Dv]."""
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    codes = None if held is None else codes_of(plan, held, key)  # without a cache the operator hashes
    moments = getattr(held, "moments", None)
    sums = moments.tensors if plan.remainder is not None and isinstance(moments, StaticMoments) else []
    given = query, key, value, mask, codes, None, factor, softcap, sinks, moments, None, length
    x = AttentionArgs(*given, first=_first_words(held, codes))
    if plan.traces(x):
        return _as_eager(plan.attend(x)[0], value, mask, sinks)
    rest = (sinks, [*sums, plan.unused], plan.number, factor, softcap)
    return attend_step(query, key, value, codes, mask, length, *rest)


def _learn(
    plan: LayerPlan, held: Held, key: Tensor, value: Tensor, mask: Tensor | None, length: Tensor | None, factor: float
) -> None:
    """Add a prompt to the remainder's sums of a static cache, so that no later step has to; not if compiled."""
    if plan.remainder is None or length is None or not isinstance(held, CodedStaticLayer) or held.moments is None:
        return
    if torch.compiler.is_compiling():
        held.moments.ready = False
    else:
        k, v, _ = trim(key, value, None, int(length))
        plan.learn(k, v, mask, held.moments, factor)


def _all_room(plan: LayerPlan, held: Held, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether a step reads the whole buffers of a static cache, because reading its length would make the host wait.

    The mask hides the unfilled part. The sums of the remainder must include all earlier tokens.
    """
    if query.shape[2] > 1 or mask is None or readable(key):
        return False
    return plan.remainder is None or (isinstance(held, CodedStaticLayer) and getattr(held.moments, "ready", False))


def _sparse(
    module: Any,
    plan: LayerPlan,
    held: Held,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    length: Tensor | None,
    whole: bool,
    factor: float,
    kwargs: dict[str, Any],
    dense: Callable[[], Output],
) -> Output:
    """Run a call that may contain a sparse row, outside of compiled graphs."""
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    end = key.shape[2] if whole else int(cast(Tensor, length))
    host = held if isinstance(held, HostLayer) else None
    small = plan.all_dense(end)
    codes, planes = (None, None) if small else _encoded(plan, held, query, key)
    k, v, codes = trim(key, value, codes, None if whole else end)
    moments = getattr(held, "moments", None)
    weights = query.new_zeros(*query.shape[:3], key.shape[2]) if _weights_wanted(module, plan, kwargs) else None
    given = query, k, v, mask, codes, host, factor, softcap, sinks, moments, weights, length
    x = AttentionArgs(*given, first=_first_words(held, codes), planes=planes)
    if small:
        if isinstance(moments, StaticMoments):
            moments.ready = False  # this step does not update them
        plan.count_dense(x)
        return dense()
    out, sparse = plan.attend(x)
    if sparse is None:
        return _as_eager(out, value, mask, sinks, weights, host is not None), weights
    if sparse.all():
        return out, weights
    all_read, all_weights = dense()
    out = torch.where(sparse[..., None, None], out, all_read)
    if weights is not None and all_weights is not None:
        weights = torch.where(sparse[:, None, :, None], weights, all_weights)
    return out, weights


def _as_eager(
    out: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    weights: Tensor | None = None,
    on_host: bool = False,
) -> Tensor:
    """Give a step's rows that see nothing what eager attention gives them, without a wait (`with_means`).

    Torch's own attention, whose mask is bool, gives zeros, as ours does; so does eager attention with sinks.

    Args:
        out: [B, 1, Hq, Dv]; value: [B, Hkv, N, Dv], of a static cache the whole buffer; mask: [B or 1, 1, 1, N].
        weights: attention weights [B, Hq, 1, N], changed in place.
        on_host: whether the values are in host memory, where the mean would take a copy of them all: such a row stops
            the device by an assertion.
    """
    if mask is None or mask.dtype == torch.bool or sinks is not None:
        return out
    sees = (mask == 0).any(-1)  # [B or 1, 1, 1]
    if on_host:
        torch._assert_async(sees.all(), _SEES_NOTHING)  # pyright: ignore[reportPrivateImportUsage]
        return out
    if weights is not None:
        weights.copy_(torch.where(sees[..., None], weights, 1 / value.shape[2]))
    return with_means(out, value, sees[:, 0])


def _weights_wanted(module: Any, plan: LayerPlan, kwargs: dict[str, Any]) -> bool:
    """Whether the caller of the model wants attention weights, which only eager attention returns.

    Raises: ValueError if weights cannot be returned for this plan.
    """
    recorded = _active_collector.get() or ()
    wanted = kwargs.get("output_attentions") or any("attentions" in name for name in recorded)
    if not wanted or module.config._attn_implementation != NAMES["eager"]:
        return False
    if plan.remainder is not None:
        raise ValueError(
            "attention weights have no column for the remainder; attach with remainder=False, or do not set "
            "output_attentions"
        )
    if plan.own is not None:
        raise ValueError(
            f"{type(plan.selector).__name__} has its own attention, which returns no weights; do not set "
            "output_attentions"
        )
    return True


def _as_wide(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Broadcast a mask to [.., .., Q, N] as torch would. Raises: ValueError if it is narrower than the keys."""
    shape = query.shape[2], key.shape[2]
    if mask is None or mask.shape[-2:] == shape:
        return mask
    if any(got not in (1, size) for got, size in zip(mask.shape[-2:], shape, strict=True)):
        raise ValueError(
            f"the mask must be for {shape[0]} rows and {shape[1]} keys, got shape {tuple(mask.shape)}; if the cache's "
            "layers differ in length, pass no mask"
        )
    return mask.expand(*mask.shape[:2], *shape)


def _require_serves(
    module: Any, plan: LayerPlan, held: Held, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> None:
    """Raise ValueError if a call of this form cannot be sparse, now or in a later step."""
    if getattr(module, "masked_key_indices", None) is not None:
        raise ValueError(
            "sparse attention does not support keys masked per head (masked_key_indices, set by AdaKV presses); use a "
            "press that removes keys"
        )
    coded = isinstance(held, CodedDynamicLayer | CodedStaticLayer)
    if plan.selector.needs_codes and (coded or type(held) in (DynamicLayer, GrowingLayer)):
        own = cast(Tensor, cast(Any, held).keys)
        if key.shape != own.shape or not _same_memory(key, own):
            raise ValueError(
                f"layer {plan.layer} must attend to the keys in its cache, {tuple(own.shape)}, got other keys, "
                f"{tuple(key.shape)}; leave this model dense"
            )
        if (
            coded
            and query.shape[2] > 1
            and (codes := cast(Tensor, held.codes).shape[1]) not in (key.shape[1], query.shape[1])
        ):
            raise ValueError(
                f"layer {plan.layer} needs codes of {key.shape[1]} KV heads or {query.shape[1]} query heads, got "
                f"{codes}; the head counts in the model's config are wrong"
            )
    if plan.own is None and plan.backend == "gather" and not autocasts(query.device):
        group = 1 if getattr(plan.selector, "per_query_head", False) else query.shape[1] // key.shape[1]
        require(query.device, query.dtype, (key.shape[3], value.shape[3]), group)
    if mask is not None and query.shape[2] > 1:
        rows, n = query.shape[2], key.shape[2]
        visible_rows(mask, rows - 1, rows, rows, n, query.device)  # later steps have masks of this form


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors start at the same memory; also works for tensors without memory (fake, meta)."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and int(a.storage_offset()) == b.storage_offset()


def _refuse(kwargs: dict[str, Any], dropout: float, sparse_call: bool) -> None:
    if kwargs.get("position_bias") is not None:
        raise ValueError("sparse attention does not support position_bias; leave this model dense")
    if kwargs.get("is_causal") is False and sparse_call:
        raise ValueError("sparse attention is causal, got is_causal=False; leave this model dense")
    if dropout and (sparse_call or not torch.is_grad_enabled()):  # dropout is fine in dense calls of training
        raise ValueError(f"sparse attention has no dropout, got {dropout}; call model.eval() first")
