"""What a run shows: progress, tables, figures, cards, TensorBoard."""
