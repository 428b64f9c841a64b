"""What tools/build_docs.py checks: commands, snippets and links."""
