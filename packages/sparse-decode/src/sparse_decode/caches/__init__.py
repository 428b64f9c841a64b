"""Cache layers that carry codes besides keys and values."""
