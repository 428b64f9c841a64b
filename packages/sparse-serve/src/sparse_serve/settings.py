"""The plug-in's settings, in vLLM's `additional_config={"spotlight": {...}}`.

This module must not import numba, which may only be imported after vLLM has detected its compilers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from sparse_decode.budget import LayerBudget

KEY = "spotlight"
NAMES = ("hasher", "fraction", "min_tokens", "max_tokens", "sink", "recent", "dense_layers")


@dataclass(frozen=True)
class Settings:
    """How an engine's full-attention layers decode.

    Attributes:
        hasher: folder of a stored `hashtrain.Hasher`.
        budget: how many tokens each row reads; its fields but `dense_below` and `by_head` are settings.
        dense_layers: indices of layers that stay dense; None: those that the hasher lists.
    """

    hasher: str
    budget: LayerBudget = field(default_factory=LayerBudget)
    dense_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        hasher, layers = cast("tuple[object, tuple[object, ...] | None]", (self.hasher, self.dense_layers))  # any type
        if not isinstance(hasher, str) or not hasher:
            raise ValueError(f"{KEY}.hasher must be the folder of a stored hasher, got {hasher!r}")
        if not isinstance(cast(object, self.budget), LayerBudget):
            raise ValueError(f"{KEY}'s budget must be a LayerBudget, got {self.budget!r}; use Settings.of")
        if self.budget.by_head:
            raise ValueError(f"{KEY} reads as many tokens in each head, got a budget by head; leave by_head out")
        if layers is not None and (type(layers) is not tuple or any(type(x) is not int or x < 0 for x in layers)):
            raise ValueError(f"{KEY}.dense_layers must be a list of indices of layers, got {layers!r}")

    @classmethod
    def of(cls, additional: Any) -> "Settings | None":
        """Read the settings from vLLM's `additional_config`; None if it has none for this plug-in.

        Raises: ValueError if a setting is unknown, missing or invalid.
        """
        asked: Any = cast("Mapping[str, Any]", additional).get(KEY) if isinstance(additional, Mapping) else None
        if asked is None:
            return None
        if not isinstance(asked, Mapping):
            raise ValueError(f"{KEY} must be a mapping with a hasher, got {type(asked).__name__}")
        given = dict(cast("Mapping[str, Any]", asked))
        if strangers := sorted(str(name) for name in given if name not in NAMES):
            raise ValueError(f"{KEY} takes {', '.join(NAMES)}, got {', '.join(strangers)}; remove these")
        if "hasher" not in given:
            raise ValueError(f"{KEY} needs a hasher, the folder of a stored hasher, got none")
        hasher, layers = given.pop("hasher"), given.pop("dense_layers", None)
        layers = tuple(cast("list[Any]", layers)) if isinstance(layers, list) else layers
        return cls(hasher, LayerBudget(**given), layers)
