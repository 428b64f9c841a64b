"""What a step or a run costs, predicted: bytes, memory, time."""
