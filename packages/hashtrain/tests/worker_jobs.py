"""Jobs for test_workers.py; in a separate module, because workers import them by name."""

import os
import signal
import time


def square(job, report):
    import torch  # here: for the other jobs nothing needs it

    time.sleep(0.2 / job)  # the first takes longest
    report(f"{job} on {torch.get_num_threads()}", 1)
    return job * job


def fail(job, report):
    if job == 2:
        raise FloatingPointError("job 2 diverged")
    time.sleep(60)


def die(job, report):
    os.kill(os.getpid(), signal.SIGKILL)


def linger(job, report):
    for _ in range(600):
        report(os.getpid())
        time.sleep(0.1)


def command_line(arguments):
    """Run `hashtrain` as in a separate process."""
    from hashtrain.cli import main

    raise SystemExit(main(arguments))
