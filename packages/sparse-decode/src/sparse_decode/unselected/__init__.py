"""The remainder: unselected tokens, added back from running sums."""
