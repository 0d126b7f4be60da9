"""Process groups and the device of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from hpctrain.config.schema import Device
from hpctrain.errors import RunError

JOIN_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Mesh:
    """This rank's place. `control` is a Gloo group of all ranks for agreements and checkpoints."""

    rank: int
    gpu: int  #: number of its GPU on the node
    world_size: int
    device: torch.device
    control: dist.ProcessGroup

    def gather_objects(self, value: object) -> list[object] | None:
        """Everybody's value in rank order on rank 0, None elsewhere. Collective."""
        gathered: list[object] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, gathered, dst=0, group=self.control)
        return gathered


def device_index(gpu: int, num_visible: int) -> int:
    """Index among the visible GPUs of the one with this number on the node: the only one, or its own."""
    if num_visible == 1:
        return 0  # each task was given a GPU of its own
    if gpu >= num_visible:
        raise RunError(
            f"no GPU {gpu} for this rank",
            f"{num_visible} GPUs are visible"
            + ("" if num_visible else ": is there a driver that torch can use?"),
            "ask for as many GPUs as there are ranks on a node (cluster.ranks_per_node, cluster.gpu_request)",
        )
    return gpu


def build_mesh(
    rank: int, gpu: int, world_size: int, device: Device, address: str, port: int, timeout_s: float
) -> Mesh:
    """Join the other ranks. Raises RuntimeError when they do not come within JOIN_TIMEOUT_S.

    `timeout_s` bounds each collective: longer than what the watchdog calls a hang, or it would look like
    a lost peer.
    """
    timeout = timedelta(seconds=timeout_s)
    where = torch.device("cpu")
    backend = "gloo"
    if device is Device.cuda:
        where = torch.device("cuda", device_index(gpu, torch.cuda.device_count()))
        torch.cuda.set_device(where)
        backend = "cpu:gloo,cuda:nccl"
    store = TCPStore(
        address, port, world_size, is_master=rank == 0, timeout=timedelta(seconds=JOIN_TIMEOUT_S)
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    return Mesh(rank, gpu, world_size, where, control)
