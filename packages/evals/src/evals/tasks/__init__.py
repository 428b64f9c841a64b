"""One module per task, each with `run(command, console)`, which returns the stored result."""
