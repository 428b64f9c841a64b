"""Training of one layer: target, pairs, loss, optimiser, and what it falls back on."""
