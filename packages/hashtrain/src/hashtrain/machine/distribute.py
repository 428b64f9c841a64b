"""Distributed training under torchrun: ranks, barriers, and sums over processes.

    python -m torch.distributed.run --nproc-per-node 2 --max-restarts 3 -m hashtrain --out runs/mine

With `--spread layers` the processes train different layers without communication and meet in the files below --out. If
one process dies, torchrun restarts all of them, and each resumes from its checkpoints. `--spread data` sums gradients.
"""

import contextlib
import datetime
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hashcore.cuda.program import require_compiler
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_PATIENCE = datetime.timedelta(days=7)  # torchrun notices a dead process; a rank may wait for another's last layer
_POLL = 0.02  # seconds


@dataclass(frozen=True)
class Ranks:
    """The processes of a run: global `rank` and `world` size, `local` rank and `local_world` size on this machine."""

    rank: int = 0
    world: int = 1
    local: int = 0
    local_world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and stores for all."""
        return self.rank == 0

    def shard(self, jobs: Sequence[Any]) -> list[Any]:
        """Return every `world`-th job, from the `rank`-th on."""
        return list(jobs[self.rank :: self.world])

    def barrier(self) -> None:
        """Wait until every process has reached this point."""
        if self.world > 1:
            dist.all_reduce(torch.zeros(1, device="cpu"))  # over gloo, whatever the device

    def all_reduce(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over the processes, bit-identical on every rank."""
        if self.world > 1:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat)
            for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(total.view_as(tensor))


ALONE = Ranks()


@contextlib.contextmanager
def init_distributed(device: str) -> Iterator[Ranks]:
    """Initialise torch.distributed inside the block; yields `ALONE` without torchrun.

    Args:
        device: as in `device_for`; CUDA adds NCCL for tensors in device memory, all others use gloo.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    store, rank, world = next(rendezvous("env://", timeout=_PATIENCE))
    local, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    backend = "cpu:gloo,cuda:nccl" if device_for(device, 0).type == "cuda" else "gloo"
    agreed = _agreed(store, rank, world)
    dist.init_process_group(backend, timeout=_PATIENCE, store=agreed, rank=rank, world_size=world)
    ranks = Ranks(rank, world, local, local_world)
    try:
        ranks.barrier()  # a process that exits early, with an error, would break connections still being made
        yield ranks
    finally:
        dist.destroy_process_group()


def _agreed(store: Store, rank: int, world: int) -> Store:
    """Agree on a store prefix that no earlier start of these processes has used.

    torchrun keeps one store across restarts, including the addresses of dead processes, and its restart counts may
    differ between machines. So rank 0 picks a fresh prefix and sends it to every rank that has announced itself.
    Announcements of dead processes are answered too, which does no harm.
    """
    name = uuid.uuid4().hex
    if rank == 0:
        while waiting := [r for r in range(1, world) if not store.check([f"ready/{name}/{r}"])]:
            for other in (r for r in waiting if store.check([f"hello/{r}"])):
                store.set(f"corner/{store.get(f'hello/{other}').decode()}", name)
            time.sleep(_POLL)
        return PrefixStore(name, store)
    store.set(f"hello/{rank}", name)
    while not store.check([f"corner/{name}"]):
        time.sleep(_POLL)
    corner = store.get(f"corner/{name}").decode()
    store.set(f"ready/{corner}/{rank}", "")
    return PrefixStore(corner, store)


def device_for(asked: str, local: int) -> torch.device:
    """Return the device that one process works on.

    Args:
        asked: `auto` (CUDA if available), `cpu`, `cuda` (one device per process of a machine) or `cuda:N`.
        local: number of the process on its machine.
    Raises: ValueError if there is no such device, or if our kernels, which are also needed after hours of training,
        cannot be compiled for it.
    """
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = asked.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    number = int(index) if index else local % max(1, count)
    if number >= count:
        got = f"{count} CUDA devices, cuda:0 to cuda:{count - 1}" if count else "no CUDA device that torch can use"
        raise ValueError(f"--device {asked} does not exist: this machine has {got}; use --device cpu")
    require_compiler()
    return torch.device("cuda", number)
