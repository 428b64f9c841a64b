"""The tasks: a function `run(command, console)` stores its results below `command.out` and returns them.

It raises ValueError or OSError with one sentence, before anything is written, if the input cannot be used. `compiled`
is a part of `throughput`, `answers` of `needle` and `ruler`; `formula` holds two tasks.
"""
