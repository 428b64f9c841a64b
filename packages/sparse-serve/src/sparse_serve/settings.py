"""The plug-in's settings, in vLLM's `additional_config={"spotlight": {...}}`.

This module must not import numba, which may only be imported after vLLM has detected its compilers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from sparse_decode.budget import LayerBudget

KEY = "spotlight"


@dataclass(frozen=True)
class Settings:
    """How an engine's full-attention layers decode.

    Attributes:
        hasher: folder of a stored `hashtrain.Hasher`.
        fraction, min_tokens, max_tokens, sink, recent, dense_below: as in `LayerBudget`, with its defaults.
        dense_layers: indices of layers that stay dense; None: those that the hasher lists.
    """

    hasher: str
    fraction: float = LayerBudget.fraction
    min_tokens: int = LayerBudget.min_tokens
    max_tokens: int | None = None
    sink: int = LayerBudget.sink
    recent: int = LayerBudget.recent
    dense_below: int = 0
    dense_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        hasher, layers = cast("tuple[object, tuple[object, ...] | None]", (self.hasher, self.dense_layers))  # any type
        if not isinstance(hasher, str) or not hasher:
            raise ValueError(f"{KEY}.hasher must be the folder of a stored hasher, got {hasher!r}")
        if layers is not None and (type(layers) is not tuple or any(type(x) is not int or x < 0 for x in layers)):
            raise ValueError(f"{KEY}.dense_layers must be a list of indices of layers, got {layers!r}")
        self.budget()

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
        given, known = dict(cast("Mapping[str, Any]", asked)), [field.name for field in fields(cls)]
        if strangers := sorted(str(name) for name in given if name not in known):
            raise ValueError(f"{KEY} takes {', '.join(known)}, got {', '.join(strangers)}; remove these")
        if "hasher" not in given:
            raise ValueError(f"{KEY} needs a hasher, the folder of a stored hasher, got none")
        if isinstance(layers := given.get("dense_layers"), list):
            given["dense_layers"] = tuple(cast("list[Any]", layers))
        return cls(**given)

    def budget(self) -> LayerBudget:
        """Return the budget: how many tokens each row reads."""
        limits = self.fraction, self.min_tokens, self.max_tokens, self.sink, self.recent
        return LayerBudget(*limits, dense_below=self.dense_below)
