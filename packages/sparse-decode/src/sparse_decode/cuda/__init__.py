"""Hashing, sums and attention of a step on CUDA, as torch operators."""
