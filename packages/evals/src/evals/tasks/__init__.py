"""One task, one module, each with `run(command, console)`, which returns the result that it stored."""
