"""Several processes at one run, started by torchrun: which of them this is, and how they wait and add.

    python -m torch.distributed.run --nproc-per-node 2 --max-restarts 3 -m hashtrain --out runs/mine

Layers are spread without a word between the processes, which meet in the files below --out: a process that is killed
takes the others with it, torchrun starts all anew, and each goes on from its checkpoints. Spread data is summed.
"""

from __future__ import annotations

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
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_PATIENCE = datetime.timedelta(days=7)  # torchrun notices a death at once; a rank may wait for another's last layer

_POLL = 0.02  # seconds


@dataclass(frozen=True)
class Ranks:
    """The processes of a run: `rank` of `world`, and `local`, its number on its machine of `local_world`."""

    rank: int = 0
    world: int = 1
    local: int = 0
    local_world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process speaks and stores for all."""
        return self.rank == 0

    def shard(self, jobs: Sequence[Any]) -> list[Any]:
        """Return every `world`-th job, from the `rank`-th on."""
        return list(jobs[self.rank :: self.world])

    def barrier(self) -> None:
        """Wait until every process has come here."""
        if self.world > 1:
            dist.all_reduce(torch.zeros(1, device="cpu"))  # over gloo, whatever the devices

    def all_reduce(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over the processes, alike to the last bit in all of them."""
        if self.world > 1:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat)
            for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(total.view_as(tensor))


ALONE = Ranks()


@contextlib.contextmanager
def init_distributed(device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun started, for as long as the block lasts; `ALONE` without torchrun.

    Args:
        device: what `device_for` takes; CUDA adds NCCL for tensors in device memory, all others go over gloo.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield ALONE
        return
    store, rank, world = next(rendezvous("env://", timeout=_PATIENCE))
    local, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_for(device, 0).type == "cuda" else "gloo",
        timeout=_PATIENCE,
        store=_agreed(store, rank, world),
        rank=rank,
        world_size=world,
    )
    ranks = Ranks(rank, world, local, local_world)
    try:
        ranks.barrier()  # one that left at once, with an error, would break the connections that others still make
        yield ranks
    finally:
        dist.destroy_process_group()


def _agreed(store: Store, rank: int, world: int) -> Store:
    """Return a corner of the store that no earlier start of these processes has used.

    torchrun keeps one store over restarts, with the dead processes' addresses in it, and its count of restarts may
    differ between machines. So the first process names a corner, and tells each other one that has said hello; stale
    hellos are answered in vain.
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
        asked: `auto` (CUDA if there is one), `cpu`, `cuda` (each process of a machine its own) or `cuda:N`.
        local: number of the process on its machine.
    Raises: ValueError if there is no such device.
    """
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = asked.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    number = int(index) if index else local % max(1, count)
    if number >= count:
        raise ValueError(f"--device {asked} is not there: expected one of {count} CUDA devices; use --device cpu")
    return torch.device("cuda", number)
