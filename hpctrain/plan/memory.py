"""Memory of a rank by what it is for, and what it takes beyond tensors: NCCL, the allocator, the host.

`decoder_memory` and `vision_memory` fill it in closed form; `core.trace` runs the real code to check them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from hpctrain.config.schema import ClusterConfig, Config, Device, OptimConfig, OptimizerKind
from hpctrain.plan.layout import Layout

MIB, GIB = 2**20, 2**30
FP32 = 4  # bytes

# NCCL's buffers of a connection, one for each protocol: 4 MiB, 4.69 MiB and 512 KiB (DEFAULT_BUFFSIZE,
# DEFAULT_LL128_BUFFSIZE and DEFAULT_LL_BUFFSIZE in NCCL's src/init.cc). They lie on the device with
# peer-to-peer, else in host memory: on the device is what is counted.
CONNECTION_BYTES = 4 * MIB + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
CHANNELS = 4  # of a communicator: a guess for PCIe, where NCCL reports 2 to 4
TREE_PEERS = 3  # a parent and two children (NCCL's double binary trees); the ring's neighbour is among them
# The end of a segment of torch's CUDACachingAllocator (kLargeBuffer, 20 MiB) for each of about four streams.
SEGMENT_BYTES = 4 * 20 * MIB
# cuBLAS's workspace, 2 · 4 MiB + 8 · 16 KiB (CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8, torch's default), in two
# streams.
WORKSPACE_BYTES = 2 * (2 * 4096 + 8 * 16) * 1024
# Holes between what comes and goes; guesses, since no GPU was at hand.
HOLES, HOLES_EXPANDABLE = 0.10, 0.05
ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"

# Host memory: of a rank's process with torch, CUDA and NCCL, and of a loader's worker; guesses.
PROCESS_BYTES, WORKER_BYTES = 3 * GIB, GIB // 2
# DCP's writer copies tensors to the host one at a time, 10 MB ahead (FileSystemWriter.per_thread_copy_ahead);
# the largest one is bounded by a gathered table or a head, counted here as 1 GiB.
STAGING_BYTES = 10_000_000 + GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank at its worst moment."""

    weights: int  #: shards: fp32, which are the master weights; frozen ones in the compute format
    gradients: int  #: fp32 shards
    optimizer: int  #: AdamW's two moments, SGD's momentum
    activations: int  #: kept for backward, of all microbatches in flight
    working: int  #: of the block, or the logits, that are computed at that moment
    gathered: int  #: weights, gradients and reduction buffers in whole; autocast's copies of weights
    averages: int = 0  #: averaged weights (optim.ema_decay)
    buffers: int = 0  #: NCCL's
    slack: int = 0  #: holes and ends of the allocator's segments, and workspaces
    host: int = 0  #: in the node's memory, not on the device: what is offloaded

    @property
    def tensors(self) -> int:
        """What `core.trace` sees."""
        return self.total - self.buffers - self.slack

    @property
    def total(self) -> int:
        """On the device."""
        return sum(int(getattr(self, field.name)) for field in fields(self)) - self.host

    def text(self) -> str:
        """The terms on the device, largest first, GiB."""
        names = [field.name for field in fields(self) if field.name != "host"]
        terms = sorted(((getattr(self, name), name) for name in names), reverse=True)
        return " · ".join(f"{name} {size / GIB:.2f}" for size, name in terms if size)


def num_moments(optim: OptimConfig) -> int:
    """Optimizer states of a parameter."""
    return 2 if optim.kind is OptimizerKind.adamw else int(optim.momentum > 0)


def with_overheads(memory: RankMemory, config: Config, layout: Layout, neighbours: int = 0) -> RankMemory:
    """With NCCL's buffers and the allocator's slack; on a CPU there are none.

    Args:
        neighbours: in the pipeline.
    """
    if config.cluster.device is Device.cpu:
        return memory
    moving = memory.activations + memory.working + memory.gathered
    holes = HOLES_EXPANDABLE if expands_segments(config.cluster) else HOLES
    return replace(
        memory,
        buffers=CHANNELS * CONNECTION_BYTES * (neighbours + sum(map(num_peers, groups(layout)))),
        slack=SEGMENT_BYTES + WORKSPACE_BYTES + round(holes * moving),
    )


def groups(layout: Layout) -> list[int]:
    """Ranks of each communicator in which a rank adds up or gathers: the world and the axes of the mesh."""
    axes = [layout.dp_replicate, layout.dp_shard, layout.tp]
    return [layout.world_size, *(size for size in axes if 1 < size < layout.world_size)]


def num_peers(ranks: int) -> int:
    """Ranks of a group with which one is connected."""
    return min(ranks - 1, TREE_PEERS)


def expands_segments(cluster: ClusterConfig) -> bool:
    """Whether the allocator grows its segments instead of adding new ones (`expandable_segments`)."""
    settings = [cluster.env.get(name, "") for name in ALLOCATOR_VARIABLES]
    return any("expandable_segments:True" in setting.replace(" ", "") for setting in settings)


def host_bytes_per_node(config: Config, memory: tuple[RankMemory, ...]) -> int:
    """Host memory of the fullest node: processes, loader workers, what is offloaded, and a checkpoint's way
    to the disk. The page cache takes what is left.

    Args:
        memory: of each place of the pipeline, whose ranks follow each other.
    """
    cluster, pp = config.cluster, len(memory)
    world = cluster.num_nodes * cluster.ranks_per_node
    places = [rank * pp // world for rank in range(world)]
    own = PROCESS_BYTES + STAGING_BYTES + config.data.num_workers * WORKER_BYTES
    nodes = range(0, world, cluster.ranks_per_node)
    return cluster.ranks_per_node * own + max(
        sum(memory[place].host for place in places[node : node + cluster.ranks_per_node]) for node in nodes
    )


def fullest(memory: tuple[RankMemory, ...]) -> int:
    """Place of the pipeline that needs most."""
    return max(range(len(memory)), key=lambda place: memory[place].total)
