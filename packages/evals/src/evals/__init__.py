"""Evaluate sparse attention: every method in one harness."""

__version__ = "2.0.0"
