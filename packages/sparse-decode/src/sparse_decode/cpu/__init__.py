"""The kernels of the CPU, in numba: a step of one layer, and dense attention."""
