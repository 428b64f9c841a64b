"""Rival selectors, reimplemented from their papers: each in one file, following `sparse_decode`'s Selector protocol;
and their table."""
