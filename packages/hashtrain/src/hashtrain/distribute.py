"""Several processes at one run, started by torchrun: which of them this is, and how they wait and add.

    python -m torch.distributed.run --nproc-per-node 2 --max-restarts 3 -m hashtrain --out runs/mine

Layers are spread without a word between the processes, which meet in the files below --out: a process that is killed
takes the others with it, torchrun starts all anew, and each goes on from its checkpoints. Spread data is summed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_PATIENCE = datetime.timedelta(days=7)  # torchrun notices a death at once; a rank may wait for another's last layer


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

    def mine(self, jobs: Sequence[Any]) -> list[Any]:
        """Return every `world`-th job, from the `rank`-th on."""
        return list(jobs[self.rank :: self.world])

    def wait(self) -> None:
        """Wait until every process has come here."""
        if self.world > 1:
            dist.all_reduce(torch.zeros(1))  # over gloo, whatever the devices

    def add(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over the processes, alike to the last bit in all of them."""
        if self.world > 1:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat)
            for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(total.view_as(tensor))


ALONE = Ranks()


@contextlib.contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun started, for as long as the block lasts; `ALONE` without torchrun.

    Args:
        device: `cuda` adds NCCL for tensors in device memory; all others go over gloo.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield ALONE
        return
    local, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo", timeout=_PATIENCE)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), local, local_world)
    finally:
        dist.destroy_process_group()


def device_for(asked: str, local: int) -> torch.device:
    """Return the device that one process works on.

    Args:
        asked: `auto` (CUDA if there is one), `cpu`, `cuda` (each process of a machine its own) or `cuda:N`.
        local: number of the process on its machine.
    Raises: ValueError if there is no such device.
    """
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(asked)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    number = local % max(1, count) if device.index is None else device.index
    if number >= count:
        raise ValueError(f"--device {asked} is not there: expected one of {count} CUDA devices; use --device cpu")
    return torch.device("cuda", number)
