"""Where ranks sit. Ranks fill the nodes in order, and tp is the innermost axis, so its ranks are neighbours.

Without peer-to-peer, GPUs under one PCIe root move about twice as much as across sockets, and a network
card a third of that: tp stays under a root, dp_shard in a node, and the pipeline, which sends least, crosses
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.config.schema import ClusterConfig
from hpctrain.plan.layout import AXES, Layout


def gpu_number(cluster: ClusterConfig, local_rank: int) -> int:
    """Which GPU of its node a rank takes: those of one PCIe root after those of the other."""
    order = [gpu for root in cluster.pcie_roots for gpu in root]
    return order[local_rank] if order else local_rank


def place(layout: Layout, rank: int, ranks_per_node: int) -> tuple[int, int, dict[str, int]]:
    """Node, local rank and coordinates of a rank."""
    node, local_rank = divmod(rank, ranks_per_node)
    return node, local_rank, layout.coordinates(rank)


def axis_groups(layout: Layout, axis: str) -> list[list[int]]:
    """The ranks that differ on this axis alone, group by group."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        position = layout.coordinates(rank)
        groups.setdefault(tuple(position[other] for other in AXES if other != axis), []).append(rank)
    return list(groups.values())


def _is_within_node(ranks: Sequence[int], ranks_per_node: int) -> bool:
    return len({rank // ranks_per_node for rank in ranks}) == 1


def _is_within_root(ranks: Sequence[int], cluster: ClusterConfig) -> bool:
    root_of = {gpu: index for index, root in enumerate(cluster.pcie_roots) for gpu in root}
    gpus = {gpu_number(cluster, rank % cluster.ranks_per_node) for rank in ranks}
    return _is_within_node(ranks, cluster.ranks_per_node) and len({root_of[gpu] for gpu in gpus}) == 1


def placement_findings(cluster: ClusterConfig, layout: Layout) -> list[str]:
    """A node that is described wrongly, or tensor-parallel ranks that no node has together."""
    found = []
    per_node, listed = cluster.ranks_per_node, sorted(gpu for root in cluster.pcie_roots for gpu in root)
    if listed and listed != list(range(per_node)):
        found.append(
            f"cluster.pcie_roots={cluster.pcie_roots}: each of the {per_node} GPUs of a node "
            f"(0 to {per_node - 1}, cluster.ranks_per_node) once"
        )
    if layout.tp > 1 and not all(_is_within_node(group, per_node) for group in axis_groups(layout, "tp")):
        found.append(
            f"parallelism.tp={layout.tp} with cluster.ranks_per_node={per_node}: tensor-parallel ranks would "
            "sit on several nodes and send every block's activations over the network; choose a tp that "
            "divides ranks_per_node"
        )
    return found


def placement_notes(cluster: ClusterConfig, layout: Layout) -> list[str]:
    """Where the ranks of each axis sit, and a warning where that is slow. The placement has no findings."""
    where = {}
    for axis in AXES:
        groups = axis_groups(layout, axis)
        if getattr(layout, axis) == 1:
            continue
        if not all(_is_within_node(group, cluster.ranks_per_node) for group in groups):
            where[axis] = "across nodes"
        elif cluster.pcie_roots and all(_is_within_root(group, cluster) for group in groups):
            where[axis] = "under a PCIe root"
        else:
            where[axis] = "in a node"
    notes = [" · ".join(f"{axis} {place}" for axis, place in where.items())] if where else []
    if cluster.pcie_roots and where.get("tp") == "in a node":
        notes.append(
            "warning: tp crosses PCIe roots, where GPUs move about half as much; "
            "a tp that divides the GPUs of a root is faster"
        )
    if where.get("dp_shard") == "across nodes":
        notes.append(
            "warning: dp_shard crosses nodes: each microbatch gathers and reduces its blocks over the "
            "network; let pp or dp_replicate cross them"
        )
    return notes
