"""The tasks: a function `run(command, console)` stores its results below `command.out` and returns them.

It raises ValueError or OSError with one sentence, before anything is written, if the input cannot be used. A task's
settings are in `settings` or `benchmark_settings`: `--help` reads them without torch. `answers` is shared
by `fidelity`, `needle` and `benchmark`.
"""
