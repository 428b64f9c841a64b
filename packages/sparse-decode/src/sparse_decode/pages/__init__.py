"""Decode steps over keys, values and codes in pages, as serving engines store them."""
