"""Any call of a sparse layer: prompts, masks, static caches, compiled graphs, and steps with options.

What cannot be sparse is refused; the rows that need not be are dense; the others go through the layer's plan.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer
from transformers.utils.output_capturing import _active_collector

from sparse_decode.attention.attend_inputs import require
from sparse_decode.caches.cache import CodedDynamicLayer, CodedStaticLayer, trim
from sparse_decode.caches.growing import GrowingLayer
from sparse_decode.caches.offload import HostLayer
from sparse_decode.caches.opaque import attend_step
from sparse_decode.layer.blocks import AttentionArgs
from sparse_decode.layer.dense_step import Output, attend_densely, with_means
from sparse_decode.layer.plan import LayerPlan
from sparse_decode.model import NAMES
from sparse_decode.modes import autocasts, no_autocast, readable
from sparse_decode.positions import visible_rows, visible_span
from sparse_decode.select import HashSelector
from sparse_decode.unselected.static_moments import StaticMoments

_SEES_NOTHING = (
    "a row of the mask sees no token, for which eager attention reads all values, here in host memory; load the model "
    'with attn_implementation="sdpa"'
)
Held = CacheLayerMixin | None
"""A layer of a cache; None if the model was called without one."""


@dataclass
class Call:
    """One call of a sparse layer: the arguments of `interface.attention`, the layer's plan and its cache layer.

    Attributes: factor: on the logits; length: number of tokens, int64 [], of a static cache, which a compiled graph
        must not read; whole: whether all of key and value is attended to: a static cache returns its whole buffers.
    """

    module: Any
    plan: LayerPlan
    held: Held
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    factor: float
    kwargs: dict[str, Any]
    length: Tensor | None = None
    whole: bool = True

    @property
    def end(self) -> int:
        """Number of tokens attended to."""
        return self.key.shape[2] if self.whole else int(cast(Tensor, self.length))

    def args(self, kv: tuple[Tensor, Tensor], codes: Tensor | None, **more: Any) -> AttentionArgs:
        """Return the arguments of `LayerPlan.attend`, for keys and values of this call and their codes."""
        softcap, sinks = self.kwargs.get("softcap"), self.kwargs.get("s_aux")
        host = self.held if isinstance(self.held, HostLayer) else None
        more |= {"moments": getattr(self.held, "moments", None)}
        given = self.query, *kv, self.mask, codes, host, self.factor, softcap, sinks
        return AttentionArgs(*given, length=self.length, **more)

    def densely(self) -> Output:
        """Attend as the model alone would."""
        kv = self.held.all_on(self.query.device) if isinstance(self.held, HostLayer) else (self.key, self.value)
        return attend_densely(self.module, self.query, *kv, self.mask, self.dropout, self.factor, **self.kwargs)


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


def _encoded(plan: LayerPlan, held: Held, q: Tensor, k: Tensor) -> tuple[Tensor | None, Any]:
    """Return `codes_of`, and the planes of a step's queries q [B, Hq, 1, D] on a GPU if hashed with the new key."""
    selector, planes = plan.selector, None
    if not isinstance(held, CodedDynamicLayer) or not isinstance(selector, HashSelector):
        return codes_of(plan, held, k), None
    if q.shape[2] > 1 or readable(q) or held.encoder is not plan.encoder:
        return codes_of(plan, held, k), None
    room, missing = held.room_for_code()
    if missing is not None:
        n = k.shape[2]
        planes = selector.encode_step(plan.layer, k[:, :, n - 1 :], room[:, :, n - 1 : n], q)
        if planes is not None:
            missing.length += 1
    return codes_of(plan, held, k), planes


def attend(call: Call) -> Output:
    """Attend, sparsely in the rows that the plan makes sparse.

    Raises: ValueError if the call cannot be sparse, now or in a later step.
    """
    plan, held, device, compiling = call.plan, call.held, call.query.device, torch.compiler.is_compiling()
    if isinstance(held, StaticLayer):
        call.length = held.cumulative_length
        call.whole = compiling or _all_room(call)
    sparse_call = plan.rule.may_be_sparse(call.query.shape[2], call.end)
    one_way = getattr(call.module, "is_causal", True) or call.mask is not None or call.query.shape[2] == 1
    _refuse(call.kwargs if one_way else {**call.kwargs, "is_causal": False}, call.dropout, sparse_call)
    if call.mask is not None and call.mask.dim() == 2:  # flash attention's, of a prompt
        if sparse_call:
            raise ValueError(
                "flash attention's mask of padding is only for dense rows; load the model with "
                'attn_implementation="sdpa"'
            )
    else:
        call.mask = _as_wide(call.mask, call.query, call.key)
    if not compiling:
        _require_serves(call)
    if not sparse_call:
        _learn(call)
        return call.densely()
    if autocasts(device):  # cast as torch's own attention does
        host = isinstance(held, HostLayer)  # its keys and values keep their dtype
        kind = call.key.dtype if host else torch.get_autocast_dtype(device.type)
        call.query, call.key, call.value = (x.to(kind) for x in (call.query, call.key, call.value))
    if compiling:
        return _compiled(call), None
    with no_autocast(device):
        return _sparse(call)


def _compiled(call: Call) -> Tensor:
    """Run a call that may contain a sparse row inside a compiled graph: [B, Q, Hq, Dv]."""
    plan, q, kv = call.plan, call.query, (call.key, call.value)
    codes = None if call.held is None else codes_of(plan, call.held, call.key)  # without a cache the operator hashes
    x = call.args(kv, codes)
    if plan.traces(x):
        return _as_eager(call, plan.attend(x)[0], x.sinks)
    sums = x.moments.tensors if plan.remainder is not None and isinstance(x.moments, StaticMoments) else []
    rest = x.sinks, [*sums, plan.unused], plan.number, call.factor, x.softcap
    return attend_step(q, *kv, codes, call.mask, call.length, *rest)


def _learn(call: Call) -> None:
    """Add a prompt to the remainder's sums of a static cache, so that no later step has to; not if compiled."""
    plan, held, length = call.plan, call.held, call.length
    if plan.remainder is None or length is None or not isinstance(held, CodedStaticLayer) or held.moments is None:
        return
    if torch.compiler.is_compiling():
        held.moments.ready = False
    else:
        k, v, _ = trim(call.key, call.value, None, int(length))
        plan.learn(k, v, call.mask, held.moments, call.factor)


def _all_room(call: Call) -> bool:
    """Whether a step reads the whole buffers of a static cache, because reading its length would make the host wait.

    The mask hides the unfilled part. The sums of the remainder must include all earlier tokens.
    """
    if call.query.shape[2] > 1 or call.mask is None or readable(call.key):
        return False
    held = call.held
    return call.plan.remainder is None or (isinstance(held, CodedStaticLayer) and getattr(held.moments, "ready", False))


def _sparse(call: Call) -> Output:
    """Run a call that may contain a sparse row, outside of compiled graphs."""
    plan, q, end = call.plan, call.query, call.end
    small = plan.all_dense(end)
    codes, planes = (None, None) if small else _encoded(plan, call.held, q, call.key)
    k, v, codes = trim(call.key, call.value, codes, None if call.whole else end)
    x = call.args((k, v), codes, planes=planes)
    if small:
        if isinstance(x.moments, StaticMoments):
            x.moments.ready = False  # this step does not update them
        plan.count_dense(x)
        return call.densely()
    _refuse_weights(call)
    out, sparse = plan.attend(x)
    if sparse is None:
        return _as_eager(call, out, x.sinks), None
    return out if sparse.all() else torch.where(sparse[..., None, None], out, call.densely()[0]), None


def _as_eager(call: Call, out: Tensor, sinks: Tensor | None) -> Tensor:
    """Give a step's rows that see nothing, of out [B, 1, Hq, Dv], what eager attention gives them, without a wait.

    Torch's own attention, whose mask is bool, gives zeros, as ours does; so does eager attention with sinks.
    """
    value, mask = call.value, call.mask
    if mask is None or mask.dtype == torch.bool or sinks is not None:
        return out
    sees = (mask == 0).any(-1)  # [B or 1, 1, 1]
    if isinstance(call.held, HostLayer):  # the mean would take a copy of all values
        torch._assert_async(sees.all(), _SEES_NOTHING)  # pyright: ignore[reportPrivateImportUsage]
        return out
    return with_means(out, value, sees[:, 0])


def _refuse_weights(call: Call) -> None:
    """Raise ValueError if the caller of the model wants attention weights, which eager attention returns."""
    recorded = _active_collector.get() or ()
    wanted = call.kwargs.get("output_attentions") or any("attentions" in name for name in recorded)
    if wanted and call.module.config._attn_implementation == NAMES["eager"]:
        raise ValueError("sparse rows have no attention weights; do not set output_attentions, or call detach()")


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


def _require_serves(call: Call) -> None:
    """Raise ValueError if a call of this form cannot be sparse, now or in a later step."""
    plan, held, query, key, mask = call.plan, call.held, call.query, call.key, call.mask
    if getattr(call.module, "masked_key_indices", None) is not None:
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
        if query.shape[2] > 1 and not coded and isinstance(plan.selector, HashSelector):
            plan.selector.require_heads(plan.layer, key)  # hashed later; codes of now are refused when they are made
        codes = cast(Tensor, held.codes).shape[1] if coded and query.shape[2] > 1 else key.shape[1]
        if codes not in (key.shape[1], query.shape[1]):
            raise ValueError(
                f"layer {plan.layer} needs codes of {key.shape[1]} KV heads or {query.shape[1]} query heads, got "
                f"{codes}; the head counts in the model's config are wrong"
            )
    if plan.own is None and not autocasts(query.device):
        group = 1 if getattr(plan.selector, "per_query_head", False) else query.shape[1] // key.shape[1]
        require(query.device, query.dtype, (key.shape[3], call.value.shape[3]), group)
    if mask is not None and mask.dim() == 4 and query.shape[2] > 1:
        rows, n = query.shape[2], key.shape[2]
        visible_span(cast(Tensor, visible_rows(mask, rows - 1, rows, rows, n, query.device)))  # as of later steps


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
