"""Attention over selected tokens and over all, on the CPU and on CUDA."""
