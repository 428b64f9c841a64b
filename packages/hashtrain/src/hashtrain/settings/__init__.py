"""The settings of a run: recipes of hashers, flags that override them, TOML files."""
