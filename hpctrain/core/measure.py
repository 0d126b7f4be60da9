"""Times that `hpctrain calibrate` takes on this rank and with the others. `plan.calibration` reduces them.

All ranks do the same at the same time, as in training, so that what they share is shared. On CUDA the time is
taken by events around several calls, after a warm-up, and the host waits only at their end. That half was
written without a GPU to try it on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.config.schema import Config, Precision
from hpctrain.core.mesh import Mesh
from hpctrain.core.stop import AgreedStop, SignalFlag
from hpctrain.plan.calibration import COLLECTIVES, NETWORK, WORLD, Row
from hpctrain.run.causes import CauseKind

REPEATS = 5
TARGET_S = 0.03  # what is shorter is done several times in one measurement
MOST_CALLS = 200
KIB = 1024

Work = Callable[[], object]


class StoppedError(Exception):
    """The ranks agreed to stop."""

    def __init__(self, reason: CauseKind) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass
class Bench:
    """Takes times on all ranks, and keeps them on rank 0."""

    config: Config
    mesh: Mesh
    stop: AgreedStop
    rows: list[Row]

    @property
    def dtype(self) -> torch.dtype:
        return {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}[
            self.config.optim.precision
        ]

    @property
    def on_gpu(self) -> bool:
        return self.mesh.device.type == "cuda"

    def add(
        self,
        what: str,
        size: float,
        work: Work | None,
        *,
        group: str = "",
        ranks: int = 1,
        at_once: int = 1,
        parts: int = 1,
        moved: float = 0.0,
        repeats: int | None = None,
    ) -> None:
        """Time some work that all ranks do; None for a rank that only waits. Collective over the world.

        Args:
            parts: What is timed is that many of what the size belongs to.

        Raises:
            StoppedError: the ranks agreed to stop.
        """
        own = self._times(work, repeats or REPEATS)
        told: Any = self.mesh.gather_objects(own)
        if told is not None:
            lists = [[each / parts for each in times] for times in told if times is not None]
            alone = ranks == 1
            seconds = (
                [s for times in lists for s in times]
                if alone
                else [max(times) for times in zip(*lists, strict=True)]
            )
            self.rows.append(Row(what, size, seconds, group, ranks, at_once, moved))
        self.stop.post()
        reason = self.stop.agreed()
        if reason is not None:
            raise StoppedError(reason)

    def _times(self, work: Work | None, repeats: int) -> list[float] | None:
        wanted, times = 0, []
        if work:
            work()  # connections are opened, kernels chosen, memory allocated
            wanted = int(TARGET_S / max(1e-9, self.time(work, 1)))
        calls = self.agree(wanted)
        for _ in range(repeats):
            dist.barrier(group=self.mesh.control)
            if work:
                times.append(self.time(work, calls))
        return times if work else None

    def time(self, work: Work, calls: int) -> float:
        """Seconds of a call, among so many."""
        if self.on_gpu:
            begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(calls):
                work()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3 / calls
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - start) / calls

    def agree(self, calls: int) -> int:
        """Most of what the ranks want, between 1 and MOST_CALLS: a rank that idles wants 0."""
        most = torch.tensor(calls)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.mesh.control)
        return max(1, min(MOST_CALLS, int(most)))


def open_bench(config: Config, mesh: Mesh, flag: SignalFlag) -> Bench:
    stop = AgreedStop(
        flag,
        mesh.control if mesh.world_size > 1 else None,
        stop_file=None,
        timeout_s=config.hang_timeout_s,
        stop_timeouts_s={},
    )
    return Bench(config, mesh, stop, [])


# Links


def node_groups(config: Config) -> dict[str, list[list[int]]]:
    """Groups of local ranks by name; those of a name work at the same time. Neighbouring ranks share a PCIe
    root (plan/placement.py), so pairs across roots are half a node apart."""
    ranks, roots = config.cluster.ranks_per_node, config.cluster.pcie_roots
    groups: dict[str, list[list[int]]] = {}
    neighbours = [[rank, rank + 1] for rank in range(0, ranks - 1, 2)]
    if roots and all(len(root) % 2 == 0 for root in roots):
        groups["root"] = neighbours
        half = ranks // 2
        groups["node2"] = [[rank, rank + half] for rank in range(half)] if len(roots) > 1 else neighbours
    elif ranks > 1:
        groups["node2"] = neighbours
    for name, fewest, size in (("node4", 3, 4), ("node8", 5, 8)):
        if ranks >= fewest:
            size = min(size, ranks)
            groups[name] = [list(range(first, first + size)) for first in range(0, ranks - size + 1, size)]
    return groups


def world_groups(config: Config) -> dict[str, list[list[int]]]:
    """Groups of ranks by name: those within nodes, those across nodes, and all ranks."""
    nodes, per_node = config.cluster.num_nodes, config.cluster.ranks_per_node
    groups = {
        name: [[node * per_node + rank for rank in group] for node in range(nodes) for group in of_a_node]
        for name, of_a_node in node_groups(config).items()
    }
    if nodes > 1:
        groups[NETWORK] = [[node * per_node + rank for node in range(nodes)] for rank in range(per_node)]
        if per_node > 1:
            groups[WORLD] = [list(range(nodes * per_node))]
    return groups


def measure_links(bench: Bench) -> None:
    """All-reduce, all-gather, reduce-scatter and messages by size, in every kind of group."""
    most = (256 if bench.on_gpu else 16) * KIB**2
    sizes = [size for size in (8 * KIB * 8**power for power in range(6)) if size <= most]
    nodes = bench.config.cluster.num_nodes
    for name, groups in world_groups(bench.config).items():
        made = [dist.new_group(ranks) for ranks in groups]  # every rank makes all of them
        own = next((i for i, ranks in enumerate(groups) if bench.mesh.rank in ranks), None)
        group = None if own is None else made[own]
        at_once = len(groups) if name in (NETWORK, WORLD) else len(groups) // nodes
        facts: dict[str, Any] = {"group": name, "ranks": len(groups[0]), "at_once": at_once}
        for size in sizes:
            for what in COLLECTIVES:
                work = None if group is None else collective(what, size, group, bench.mesh.device)
                bench.add(what, _whole(size, len(groups[0])), work, **facts)
            if len(groups[0]) == 2 or name == NETWORK:
                message = None if own is None else exchange(size, groups[own], bench.mesh)
                bench.add("send", size, message, parts=2, **facts)


def _whole(size: int, ranks: int) -> int:
    """The next smaller number of bytes that can be cut into fp32 shares."""
    return size - size % (4 * ranks)


def collective(what: str, size: int, group: Any, device: torch.device) -> Work:
    """One collective of fp32 tensors whose whole has about that size, bytes."""
    ranks = group.size()
    whole = torch.zeros(_whole(size, ranks) // 4, device=device)
    share = torch.zeros(len(whole) // ranks, device=device)
    # As FSDP calls them; the functions of torch.distributed have other names in torch 2.13 and 2.14.
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: group._allgather_base(whole, share).wait(),
        "reduce_scatter": lambda: group._reduce_scatter_base(share, whole).wait(),
    }[what]


def exchange(size: int, ranks: Sequence[int], mesh: Mesh) -> Work | None:
    """A message to the next rank of the group and one back, for every second rank; the last of an odd number
    of ranks has nobody."""
    place = ranks.index(mesh.rank)
    pairs = [pair for index, pair in enumerate(pairwise(ranks)) if index % 2 == 0]
    pair = next((pair for pair in pairs if mesh.rank in pair), None)
    if pair is None:
        return None
    buffer = torch.zeros(size // 4, device=mesh.device)
    other = pair[0] if mesh.rank == pair[1] else pair[1]
    return lambda: _ping(buffer, other) if place % 2 == 0 else _pong(buffer, other)


def _ping(buffer: Tensor, other: int) -> None:
    dist.send(buffer, other)
    dist.recv(buffer, other)


def _pong(buffer: Tensor, other: int) -> None:
    dist.recv(buffer, other)
    dist.send(buffer, other)


def measure_overlap(bench: Bench) -> None:
    """Products alone, an all-reduce over all ranks alone, and both at once; both alone are made as long."""
    if bench.mesh.world_size == 1:
        return
    side = 4096 if bench.on_gpu else 512
    a, b = (torch.randn(side, side, device=bench.mesh.device, dtype=bench.dtype) for _ in range(2))
    buffer = torch.zeros((64 if bench.on_gpu else 8) * KIB**2 // 4, device=bench.mesh.device)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b)

    def both(count: int) -> None:
        work = dist.all_reduce(buffer, async_op=True)
        products(count)
        assert work is not None
        work.wait()

    products(1)
    dist.all_reduce(buffer)
    reduce_s, product_s = bench.time(lambda: dist.all_reduce(buffer), 3), bench.time(lambda: products(1), 3)
    count = bench.agree(round(reduce_s / product_s))
    world = bench.mesh.world_size
    bench.add("compute_alone", count, lambda: products(count), ranks=world)
    bench.add("reduce_alone", buffer.nbytes, lambda: dist.all_reduce(buffer), ranks=world)
    bench.add("both", count, lambda: both(count), ranks=world)
