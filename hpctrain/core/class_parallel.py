"""Class parallelism: the identities of a margin softmax, shared out over the data-parallel ranks.

Each rank holds C / ranks rows of the identity centres, with their gradients and optimizer states. It sees the
embeddings and labels of all ranks and computes their cosines to its own rows; the softmax is taken over
all ranks (An et al. 2022, Partial FC). What crosses the network grows with the batch, not with C.
The rest of the model stays data parallel, and DDP leaves these rows alone.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from hpctrain.errors import ConfigError


@runtime_checkable
class ClassHead(Protocol):
    """A module with one row of `weight` (on meta until it is sharded) for each identity."""

    weight: nn.Parameter
    shard: GroupShard | None

    def make_rows(self, start: int, stop: int) -> Tensor:
        """Return the initial rows start … stop - 1, which do not depend on the other rows."""

    def begin_step(self, step: int) -> None:
        """Draw the negatives of this step."""


class GroupShard:
    """A rank's place in a group of ranks that share the identities; see `ClassShard` of the models."""

    def __init__(self, start: int, group: dist.ProcessGroup) -> None:
        self.start, self.group = start, group
        self.rank, self.num_ranks = group.rank(), group.size()

    def gather(self, value: Tensor) -> Tensor:
        gathered = value.new_empty((len(value) * self.num_ranks, *value.shape[1:]))
        dist.all_gather(list(gathered.chunk(self.num_ranks)), value.contiguous(), group=self.group)
        return gathered

    def scatter_sum(self, value: Tensor) -> Tensor:
        own = value.new_empty((len(value) // self.num_ranks, *value.shape[1:]))
        dist.reduce_scatter(own, list(value.contiguous().chunk(self.num_ranks)), group=self.group)
        return own

    def max_(self, value: Tensor) -> None:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)

    def sum_(self, value: Tensor) -> None:
        dist.all_reduce(value, group=self.group)


def apply_class_parallel(model: nn.Module, mesh: DeviceMesh) -> list[ClassHead]:
    """Share out the rows of every `ClassHead` of `model` that is on meta, in place; the rest is left alone.

    To be called before the model is moved to a device, given to DDP, or its parameters to an optimizer.
    Only a rank's own rows are ever built; they do not depend on the number of ranks. The weight becomes a
    DTensor, Shard(0), which checkpoints save and load over any number of ranks.

    Args:
        mesh: the data-parallel ranks, one axis.

    Returns:
        the sharded heads: `begin_step` is to be called on each before a step.

    Raises:
        ConfigError: a rank would be left without an identity.
    """
    heads: list[ClassHead] = []
    for name, module in model.named_modules():
        if isinstance(module, ClassHead) and module.weight.is_meta:
            _shard_rows(module, mesh)
            heads.append(module)
            ignored = {f"{name}.weight", *getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
    return heads


def _shard_rows(head: ClassHead, mesh: DeviceMesh) -> None:
    shape = head.weight.shape
    num_rows, ranks = -(-shape[0] // mesh.size()), mesh.size()  # as torch.chunk cuts, and so DTensor
    start = num_rows * mesh.get_local_rank()
    if num_rows * (ranks - 1) >= shape[0]:
        raise ConfigError(
            f"model.class_parallel=true shares out {shape[0]} identities over {ranks} ranks",
            f"at {num_rows} a rank, the last rank is left with none",
            "set model.class_parallel=false: so few identities fit on every card",
        )
    rows = head.make_rows(start, min(shape[0], start + num_rows)).to(torch.device(mesh.device_type))
    weight = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
    head.weight = nn.Parameter(weight)
    head.shard = GroupShard(start, mesh.get_group())
