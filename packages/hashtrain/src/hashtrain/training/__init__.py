"""Training of one layer: target, pairs, loss, optimiser, checkpoints, memory."""
