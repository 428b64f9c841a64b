"""A run, from text to stored hashers: inputs, captures, one job per layer and hasher, estimates of its cost."""
