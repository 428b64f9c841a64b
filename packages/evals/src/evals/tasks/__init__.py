"""The tasks, one module each: `run(command, console)` stores its results below `command.out` and returns them.

It raises ValueError or OSError with one sentence, before anything is written, if the input cannot be used. Modules
without `run` are parts that tasks share: answers, clocked, compiled, formula, stored_answers.
"""
