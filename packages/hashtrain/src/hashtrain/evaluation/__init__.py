"""Evaluation after training: quality on held-out rows, the fitted remainder, the cost of each layer."""
