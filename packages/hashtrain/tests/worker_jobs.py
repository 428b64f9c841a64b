"""Jobs for test_workers.py; in a separate module, because workers import them by name."""

import os
import signal
import sys
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


def knows_its_work(job, report):
    """Whether what jobs need is imported, and nothing that only their parent needs."""
    return {"hashtrain.run.job", "hashtrain.run.waves"} <= sys.modules.keys() and "matplotlib" not in sys.modules


def linger(job, report):
    for _ in range(600):
        report(os.getpid())
        time.sleep(0.1)


def private_bytes(job, report, model):
    """Run a model that all workers share; return this process's private memory, in bytes."""
    from hashtrain.data.capture import run_context

    run_context(model, job)
    with open("/proc/self/smaps_rollup") as file:
        sizes = dict(line.split(":") for line in file if line.startswith("Private_"))
    return sum(1024 * int(size.split()[0]) for size in sizes.values())


def command_line(arguments):
    """Run `hashtrain` as in a separate process, without its figures."""
    from hashtrain.cli import main
    from hashtrain_runs import without_figures

    with without_figures():
        raise SystemExit(main(arguments))


def its_number(job, report):
    from hashtrain.machine import workers

    time.sleep(0.5)  # so that the other worker takes the other job
    return workers.number


class Stubborn(Exception):
    def __reduce__(self):
        raise TypeError("this error stays where it is")


def break_stubbornly(job, report):
    raise Stubborn("it broke")
