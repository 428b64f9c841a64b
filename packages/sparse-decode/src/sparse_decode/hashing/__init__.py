"""Hash functions for the keys and queries of a call, on the CPU and on CUDA."""
