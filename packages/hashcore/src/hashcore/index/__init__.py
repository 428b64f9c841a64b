"""A searchable collection of bit codes: built from embeddings or codes, changed by id, kept in one file."""

from hashcore.index.bit_index import BitIndex

__all__ = ["BitIndex"]
