"""Sparse attention inside serving engines. So far one: vLLM, which finds `sparse_serve.plugin` by its entry point."""

from sparse_serve.settings import Settings

__all__ = ["Settings"]
__version__ = "0.1.0"
