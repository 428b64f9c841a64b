"""Sparse attention in serving engines. Supports vLLM, which loads `sparse_serve.plugin` through an entry point."""

from sparse_serve.settings import Settings

__all__ = ["Settings"]
__version__ = "0.1.0"
