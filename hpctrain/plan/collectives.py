"""How long collectives and sends take: latency and bandwidth of rings.

Ring algorithms (Patarasuk & Yuan 2009; nccl-tests' PERFORMANCE.md): of `size` bytes, each of n ranks sends
(n-1)/n · size in a gather or a reduction, in n - 1 hops, and twice that in an all-reduce. A group within a
node has the bus bandwidth that was measured for its size; a ring over several nodes goes through each node's
network card once, which all groups of the node use at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import ClusterConfig
from hpctrain.plan.layout import Layout


@dataclass(frozen=True, slots=True)
class Group:
    """Where the ranks of one axis sit. All groups of an axis sit alike."""

    size: int
    ranks_per_node: int  #: of this group
    groups_per_node: int  #: that work at the same time
    under_one_root: bool = False

    @property
    def crosses_nodes(self) -> bool:
        return self.ranks_per_node < self.size


def axis_group(layout: Layout, cluster: ClusterConfig, axis: str) -> Group:
    """The groups of an axis: the ranks that differ on it alone. Ranks fill the nodes in order."""
    per_node = cluster.ranks_per_node
    inner = {
        "tp": 1,
        "dp_shard": layout.tp,
        "dp_replicate": layout.tp * layout.dp_shard,
        "pp": layout.tp * layout.dp,
    }[axis]
    size = getattr(layout, axis)
    here = max(1, min(size, per_node // inner))
    return Group(size, here, max(1, per_node // here), _is_under_a_root(cluster, inner, here, size))


def _is_under_a_root(cluster: ClusterConfig, inner: int, here: int, size: int) -> bool:
    """Whether each group, of ranks `inner` apart, is under one root, whose GPUs are neighbouring ranks."""
    if not cluster.pcie_roots or here < size:
        return False
    span = inner * size
    return all(len(root) % span == 0 for root in cluster.pcie_roots)


def bus_gbps(group: Group, hardware: Hardware) -> float:
    """Bus bandwidth of a collective of this group, GB/s."""
    here = group.ranks_per_node
    if here == 1:
        inside = float("inf")
    elif here == 2:
        inside = hardware["root_gbps" if group.under_one_root else "node2_gbps"]
    else:
        inside = hardware["node4_gbps" if here <= 4 else "node8_gbps"]
    return min(inside, hardware["network_gbps"] / group.groups_per_node) if group.crosses_nodes else inside


def all_gather_s(size_bytes: float, group: Group, hardware: Hardware) -> float:
    """Seconds until all ranks have the whole of a tensor of that size."""
    if group.size == 1:
        return 0.0
    share = (group.size - 1) / group.size
    return share * size_bytes / (bus_gbps(group, hardware) * 1e9) + _latency_s(group, hardware)


def reduce_scatter_s(size_bytes: float, group: Group, hardware: Hardware) -> float:
    """Seconds until each rank has its share of the sum of tensors of that size."""
    return all_gather_s(size_bytes, group, hardware)


def all_reduce_s(size_bytes: float, group: Group, hardware: Hardware) -> float:
    """Seconds until all ranks have the sum of tensors of that size: a reduction and a gather."""
    return 2 * all_gather_s(size_bytes, group, hardware)


def _latency_s(group: Group, hardware: Hardware) -> float:
    """Of n - 1 hops, of which those between nodes take longer."""
    nodes = -(-group.size // group.ranks_per_node)
    between = nodes - 1
    inside = group.size - 1 - between
    microseconds = inside * hardware["node_latency_us"] if inside else 0.0
    return (microseconds + (between * hardware["network_latency_us"] if between else 0)) * 1e-6


def send_s(size_bytes: float, hardware: Hardware, *, between_nodes: bool, senders: int = 1) -> float:
    """Seconds of one message to a neighbour.

    Args:
        senders: ranks of a node that send to another node at the same time, and share its network card.
    """
    if between_nodes:
        return size_bytes * senders / (hardware["network_gbps"] * 1e9) + hardware["network_latency_us"] * 1e-6
    return size_bytes / (hardware["send_gbps"] * 1e9) + hardware["node_latency_us"] * 1e-6


def boundary_send_s(size_bytes: float, layout: Layout, cluster: ClusterConfig, hardware: Hardware) -> float:
    """Seconds of a message over the boundary between two pipeline stages, on average over the boundaries."""
    if layout.pp == 1:
        return 0.0
    stage_ranks, per_node = layout.world_size // layout.pp, cluster.ranks_per_node
    if layout.world_size <= per_node:
        return send_s(size_bytes, hardware, between_nodes=False)
    outside = send_s(size_bytes, hardware, between_nodes=True, senders=min(stage_ranks, per_node))
    stages_per_node = max(1, per_node // stage_ranks)
    crossings = -(-layout.pp // stages_per_node) - 1
    inside = layout.pp - 1 - crossings
    if not inside:
        return outside
    return (crossings * outside + inside * send_s(size_bytes, hardware, between_nodes=False)) / (
        layout.pp - 1
    )
