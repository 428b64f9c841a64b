"""Checks of tools/build_docs.py: commands, snippets, links and pages."""
