"""Process groups and the device of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from hpctrain.config.schema import Device

JOIN_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Mesh:
    """This rank's place. `control` is a Gloo group of all ranks for agreements and checkpoints."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup

    def gather_objects(self, value: object) -> list[object] | None:
        """Everybody's value in rank order on rank 0, None elsewhere. Collective."""
        gathered: list[object] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, gathered, dst=0, group=self.control)
        return gathered


def build_mesh(
    rank: int, local_rank: int, world_size: int, device: Device, address: str, port: int, timeout_s: float
) -> Mesh:
    """Join the other ranks. Raises RuntimeError when they do not come within JOIN_TIMEOUT_S.

    `timeout_s` bounds each collective: longer than what the watchdog calls a hang, or it would look like
    a lost peer.
    """
    timeout = timedelta(seconds=timeout_s)
    where = torch.device("cpu")
    backend = "gloo"
    if device is Device.cuda:
        # With CUDA_VISIBLE_DEVICES bound to one GPU per task there is only index 0.
        where = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(where)
        backend = "cpu:gloo,cuda:nccl"
    store = TCPStore(
        address, port, world_size, is_master=rank == 0, timeout=timedelta(seconds=JOIN_TIMEOUT_S)
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    return Mesh(rank, local_rank, world_size, where, control)
