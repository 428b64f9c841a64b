"""Evaluate sparse attention: every method in one harness."""

from typing import TYPE_CHECKING

from hashtrain.lazy import export

if TYPE_CHECKING:
    from evals.methods import METHODS, LoadedMethod, load_methods
    from evals.metrics import bootstrap, mean_kl, perplexity, token_losses
    from evals.results import Result, Row, read_result

export(
    __name__,
    {
        "methods": ("METHODS", "LoadedMethod", "load_methods"),
        "metrics": ("bootstrap", "mean_kl", "perplexity", "token_losses"),
        "results": ("Result", "Row", "read_result"),
    },
)
__version__ = "2.0.0"
__all__ = [
    "METHODS",
    "LoadedMethod",
    "Result",
    "Row",
    "bootstrap",
    "load_methods",
    "mean_kl",
    "perplexity",
    "read_result",
    "token_losses",
]
