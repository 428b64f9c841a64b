"""Data: texts, the contexts cut from them, and the captured queries, keys and values."""
