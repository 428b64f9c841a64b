"""A hasher as stored: its folder, and the conversion of the paper's published files."""
