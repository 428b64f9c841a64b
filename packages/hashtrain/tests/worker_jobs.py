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
    return {"hashtrain.run.job", "hashtrain.run.sources"} <= sys.modules.keys() and "matplotlib" not in sys.modules


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


def as_rank(number, world, port):
    """Set the environment of torchrun's process `number` of `world`."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def rank(number, world, port, arguments):
    """Run `hashtrain` as torchrun's process `number` of `world`."""
    as_rank(number, world, port)
    command_line(arguments)


def join_late(number, world, port, folder):
    """Join as process `number` of `world`, the last one half a second late, and record when it joined and continued."""
    from hashtrain.machine import distribute

    def connect(*args, own=distribute.dist.init_process_group, **how):
        own(*args, **how)
        time.sleep(number * 0.5)
        (folder / f"connected-{number}").write_text(str(time.monotonic()))

    distribute.dist.init_process_group = connect
    as_rank(number, world, port)
    with distribute.init_distributed("cpu"):
        (folder / f"entered-{number}").write_text(str(time.monotonic()))


class Stubborn(Exception):
    def __reduce__(self):
        raise TypeError("this error stays where it is")


def break_stubbornly(job, report):
    raise Stubborn("it broke")
