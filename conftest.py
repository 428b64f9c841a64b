"""Tests run two at a time (pyproject.toml), so each gets one thread: two that share a core wait for each other."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
