"""The config of a hasher: its variant, its size, and the model it belongs to."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal, TypeGuard, cast

from hashcore.validation import are_short

Heads = Literal["kv", "query"]
"""One target and selection per KV head, or one per query head."""
VARIANTS = ("lsh", "linear", "paper", "planes", "transform")
FORMAT_VERSION = 5
TERMS_OF = {3: 6, 4: 5}
"""Terms of the remainder in hashers of older versions. Those of 3 load without it: its weight had others. Those of 4
lack the coefficient of the number selected, which is 0 then."""
SINK = 4
"""Number of first tokens that every row reads by default. Heads with nothing to look up attend to one of these: the
first, or, after a number or `#` at the start in Qwen2.5, the second; a row that misses it loses most of its attention
(docs/adr/0012-always-read.md)."""
RECENT = 4
"""Number of last tokens, including its own, that every row reads by default: the worst rows of the worst head missed
these."""
SOFTSIGN_GAMMA = 64.0
"""From the paper's appendix."""
START_STD = 1e-3
"""Standard deviation of a Gaussian start, from the authors' code; the paper gives none."""
_MOST_REACH = 1 << 31
_DIGEST = re.compile(r"([0-9a-f]{12})?", re.ASCII)
MAX_DIGITS = 8
"""Most bits that `transform` gives one dimension of a head: as many as a query has planes."""


@dataclass(frozen=True)
class ModelShape:
    """The properties of the base model that a hasher depends on, read from its Hugging Face config."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rope: dict[str, Any] = field(default_factory=dict)
    per_layer: tuple[tuple[int, int, int], ...] = ()
    """Query heads, KV heads and head_dim of every layer; empty if all layers are alike. The fields above describe the
    first layer."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_query_heads", "num_kv_heads", "head_dim"):
            _require_size(name, getattr(self, name))
        if not _is_list(self.per_layer) or any(not _is_list(heads) or len(heads) != 3 for heads in self.per_layer):
            raise ValueError(f"per_layer must list query heads, KV heads and head_dim, got {self.per_layer!r}")
        if not _is_object(self.rope):
            raise ValueError(f"rope must be an object, got {self.rope!r}")
        object.__setattr__(self, "per_layer", tuple(tuple(heads) for heads in self.per_layer))  # JSON has lists
        if self.per_layer and len(self.per_layer) != self.num_layers:
            raise ValueError(f"per_layer must have {self.num_layers} layers, got {len(self.per_layer)}")
        for hq, hkv, d in ((self.num_query_heads, self.num_kv_heads, self.head_dim), *self.per_layer):
            for value in (hq, hkv, d):
                _require_size("heads and head_dim by layer", value)
            if hq % hkv:
                raise ValueError(f"query heads must be a multiple of KV heads, got {hq} and {hkv}")

    def at(self, layer: int) -> "ModelShape":
        """Return the shape of one layer, as a model whose layers are all like it."""
        if not self.per_layer:
            return self
        hq, hkv, d = self.per_layer[layer]
        return replace(self, num_query_heads=hq, num_kv_heads=hkv, head_dim=d, per_layer=())

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_query_heads // self.num_kv_heads

    @classmethod
    def of(cls, model_config: Any) -> "ModelShape":
        """Read the shape from a Hugging Face causal LM's config.

        Raises: ValueError if the model stores compressed keys (MLA), which have no per-head key to hash, or its config
            lacks the number of heads.
        """
        config = model_config.get_text_config(decoder=True)
        if compresses_keys(config):
            raise ValueError(
                f"{config.model_type} stores compressed keys (multi-head latent attention), expected one key per KV "
                "head; hash retrieval does not apply to it"
            )
        try:
            count = config.num_hidden_layers
            # Homogeneous configs return a view of themselves here, heterogeneous ones (Gemma 4) one config per layer.
            layers = getattr(config, "per_layer_config", None) or [config] * count
            heads = [_heads(layers[layer]) for layer in range(count)]
            hq, hkv, d = heads[0]
        except (AttributeError, IndexError, KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError(
                f"the config of {config.model_type} lacks the heads of each layer ({type(error).__name__}: {error}); "
                "expected a causal LM with attention"
            ) from error
        rope = dict(getattr(config, "rope_parameters", None) or {})
        return cls(count, hq, hkv, d, rope, tuple(heads) if len(set(heads)) > 1 else ())


def compresses_keys(config: Any) -> bool:
    """Whether any layer stores compressed keys (MLA); in a heterogeneous config every layer is checked."""
    layers = [config]
    if getattr(config, "is_heterogeneous", False):
        layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    return any(getattr(layer, "kv_lora_rank", None) for layer in layers)


# Values read from a file may have any type, whatever the annotations say.
def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def are_shares(value: object) -> bool:
    """Whether a value is a sequence of numbers above 0."""
    return _is_list(value) and all(type(x) in (int, float) and 0 < x < math.inf for x in value)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_record(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    pairs = cast("dict[object, object]", value).items()
    return len(pairs) <= 64 and all(_is_text(k) and isinstance(v, str | int | float) for k, v in pairs)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _require_size(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise ValueError(f"{name} must be an integer from 1 to {1 << 20}, got {value!r}")


def _heads(config: Any) -> tuple[int, int, int]:
    """Read query heads, KV heads and head_dim of one layer's config."""
    hq = config.num_attention_heads
    hkv = getattr(config, "num_key_value_heads", None) or hq
    return hq, hkv, getattr(config, "head_dim", None) or config.hidden_size // hq


@dataclass(frozen=True)
class HasherConfig:
    """One hasher: `variant` (docs/algorithm.md, Variants), code length, and the model it was made for."""

    variant: str
    shape: ModelShape
    bits: int = 128
    planes: int = 0
    """Bit planes of queries (eq. 5), for `planes` and `transform`; 0 selects the variant's default: 3 and 6."""
    hidden: int = 128
    """Hidden width of the MLP."""
    init: str = "rotation"
    """`gaussian`, for `paper` only, is the paper's start: normal numbers with standard deviation START_STD. Otherwise
    `paper` starts as torch's linear layers, and all other variants as LSH."""
    estimator: str = ""
    """`paper` only: `straight-through` trains it with our surrogate for the sign; "" as in the paper, with softsign."""
    residual: bool = False
    """`paper` only: the residuals and the second bias of the authors' published hashers, with a small random start."""
    training: dict[str, Any] = field(default_factory=dict)
    """Training settings (`hashtrain.TrainConfig`), for information only. Empty if untrained."""
    reach: int | None = None
    """The longest context that it was made for, in tokens (`hashtrain.data.offsets`). None: it is not made from
    contexts, or before reaches were recorded; a trained one then reaches as far as its training's contexts."""
    dense_layers: tuple[int, ...] = ()
    """Layers that stay dense, because sparse attention was measured to cost too much there."""
    layer_shares: tuple[float, ...] = ()
    """For each layer the budget that suits it, relative to the mean (`hashtrain.evaluation.cost.layer_shares`); empty
    if not measured."""
    head_shares: tuple[tuple[float, ...], ...] = ()
    """For each layer the budgets that suit its KV heads, relative to their mean
    (`hashtrain.evaluation.cost.head_shares`); empty if not measured."""
    base_model: str = ""
    base_revision: str | None = None
    adapter: str | None = None
    """A digest of the LoRA adapter (`hashtrain.adapters`) in the model whose queries and keys it was made from; "" if
    it had none. None: it is not made from any, or before adapters were recorded."""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if type(self.planes) is int and self.planes == 0:
            object.__setattr__(self, "planes", 6 if self.variant == "transform" else 3)
        for problem in chain(self._origin_problems(), self._size_problems(), self._start_problems()):
            raise ValueError(problem)
        object.__setattr__(self, "dense_layers", tuple(sorted(set(self.dense_layers))))  # JSON has lists
        object.__setattr__(self, "layer_shares", tuple(self.layer_shares))
        object.__setattr__(self, "head_shares", tuple(tuple(own) for own in self.head_shares))

    def _origin_problems(self) -> Iterator[str]:
        """Check the model's name and the lists of its layers."""
        shape, layers, heads = self.shape, self.layer_shares, self.head_shares
        if not _is_text(self.base_model) or not (self.base_revision is None or _is_text(self.base_revision)):
            got = f"{self.base_model!r} and {self.base_revision!r}"
            yield f"base_model and base_revision must be strings, got {got}"
        if self.adapter is not None and not (_is_text(self.adapter) and _DIGEST.fullmatch(self.adapter)):
            yield f"adapter must be a digest of 12 hexadecimal digits, empty or null, got {self.adapter!r}"
        known = range(shape.num_layers)
        if not _is_list(self.dense_layers) or any(type(n) is not int or n not in known for n in self.dense_layers):
            yield f"dense_layers must list layers from 0 to {shape.num_layers - 1}, got {self.dense_layers!r}"
        if not are_shares(layers) or len(layers) not in (0, shape.num_layers):
            yield f"layer_shares must list {shape.num_layers} numbers above 0, or none, got {layers!r}"
        counts = [shape.at(layer).num_kv_heads for layer in known]
        if not _is_list(heads) or (heads and (not all(map(are_shares, heads)) or [*map(len, heads)] != counts)):
            wanted = f"a number above 0 for each KV head of each layer, {counts}, or none"
            yield f"head_shares must list {wanted}, got {heads!r}"

    def _size_problems(self) -> Iterator[str]:
        if self.format_version != FORMAT_VERSION:
            yield f"format_version must be {FORMAT_VERSION}, got {self.format_version!r}; upgrade hashtrain or retrain"
        if self.variant not in VARIANTS:
            yield f"variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}"
        if type(self.bits) is not int or not 32 <= self.bits <= 4096 or self.bits % 32:
            yield f"bits must be a multiple of 32 between 32 and 4096, got {self.bits!r}"
        for name, most in (("planes", 8), ("hidden", 65536)):
            if type(value := getattr(self, name)) is not int or not 1 <= value <= most:
                yield f"{name} must be between 1 and {most}, got {value!r}"
        shape = self.shape
        groups = (shape.at(layer).group for layer in range(len(shape.per_layer) or 1))
        total = 2**self.planes - 1 if self.variant in ("planes", "transform") else max(groups)  # of the planes' weights
        if not are_short(self.bits // 32, (total,)):
            yield f"scores must fit 16 bits, got {total} times {self.bits} bits; use fewer bits or planes"
        if self.reach is not None and (type(self.reach) is not int or not 1 <= self.reach <= _MOST_REACH):
            yield f"reach must be between 1 and {_MOST_REACH} tokens, or null, got {self.reach!r}"
        if self.variant == "transform":
            least = MAX_DIGITS * min((d for _, _, d in self.shape.per_layer), default=self.shape.head_dim)
            if self.bits > least:
                most = f"at most {MAX_DIGITS} bits per dimension of a head, {least} here"
                remedy = "use fewer bits, or another variant (`hashtrain --only planes`)"
                yield f"transform stores {most}, got {self.bits}; {remedy}"

    def _start_problems(self) -> Iterator[str]:
        """Check that the start and the training suit the variant."""
        if self.init not in ("rotation", "random", "gaussian"):  # the second is that of stored hashers alone
            yield f"init must be rotation or gaussian, got {self.init!r}"
        if self.init == "gaussian" and self.variant != "paper":
            yield f"init=gaussian requires variant paper, got {self.variant}"
        if self.estimator not in ("", "straight-through", "softsign"):
            yield f"estimator must be straight-through, softsign or empty, got {self.estimator!r}"
        if not _is_record(self.training):
            yield f"training must hold at most 64 strings and numbers, got {str(self.training)[:80]!r}"
        if type(self.residual) is not bool or (self.residual and self.variant != "paper"):
            yield f"residual requires variant paper, got {self.variant}"

    def at(self, layer: int) -> "HasherConfig":
        """Return the config of one layer's hash functions, with that layer's shape."""
        return replace(self, shape=self.shape.at(layer), head_shares=()) if self.shape.per_layer else self

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "HasherConfig":
        """Rebuild a config from its JSON form. Raises: ValueError on unknown or missing fields."""
        known = {f.name for f in fields(cls)}
        data = {name: value for name, value in data.items() if name != "gamma"}  # of 1.0; mattered in training alone
        if unknown := sorted(set(data) - known):
            raise ValueError(f"unknown hasher config fields {unknown}, expected {sorted(known)}")
        try:
            arguments: dict[str, Any] = {**data, "shape": ModelShape(**data["shape"])}
            return cls(**arguments)
        except (KeyError, TypeError) as error:
            raise ValueError(f"hasher config is incomplete or malformed: {error}") from error
