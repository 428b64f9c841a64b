"""One sparse layer of an attached model: plain decode steps, and every other call."""
