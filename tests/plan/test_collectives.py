"""Collectives and sends against closed forms and published measurements."""

from __future__ import annotations

import math

import pytest

from hpctrain.config.hardware import Hardware, find_hardware
from hpctrain.config.schema import ClusterConfig
from hpctrain.plan.collectives import (
    Group,
    all_gather_s,
    all_reduce_s,
    axis_group,
    boundary_send_s,
    bus_gbps,
    reduce_scatter_s,
    send_s,
)
from hpctrain.plan.layout import Layout

ROOTS = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture
def hardware() -> Hardware:
    figures = {
        "root_gbps": 20,
        "node2_gbps": 10,
        "node4_gbps": 8,
        "node8_gbps": 5,
        "send_gbps": 10,
        "network_gbps": 3,
        "node_latency_us": 1e-9,
        "network_latency_us": 1e-9,
    }
    found = find_hardware("rtx4090")
    for figure, value in figures.items():
        found = found.with_value(figure, value)
    return found


def test_bus_bandwidth_is_that_of_nccl_tests(hardware: Hardware) -> None:
    """nccl-tests' PERFORMANCE.md: time = 2 (n-1)/n · size / bandwidth, half of that without the gather."""
    group = Group(8, 8, 1)
    assert all_reduce_s(5e9, group, hardware) == pytest.approx(2 * 7 / 8)
    assert all_gather_s(5e9, group, hardware) == reduce_scatter_s(5e9, group, hardware)
    assert all_gather_s(5e9, group, hardware) == pytest.approx(7 / 8)


def test_20_mb_over_the_shared_memory_of_nccl_take_what_was_measured() -> None:
    """sgl-project/sglang#39605, two cards: 10.9 ms at 1.9 GB/s, 39 us for a small one."""
    hardware = find_hardware("rtx4090").with_value("node2_gbps", 1.9).with_value("node_latency_us", 39 / 2)
    assert all_reduce_s(20 * 2**20, Group(2, 2, 1), hardware) == pytest.approx(10.9e-3, rel=0.02)
    assert all_reduce_s(1024, Group(2, 2, 1), hardware) == pytest.approx(39e-6, rel=0.02)


@pytest.mark.parametrize(
    ("size", "here", "under_one_root", "expected"),
    [(2, 2, True, 20), (2, 2, False, 10), (3, 3, False, 8), (4, 4, False, 8), (8, 8, False, 5)],
)
def test_bandwidth_within_a_node_goes_by_the_size_of_the_group(
    hardware: Hardware, size: int, here: int, under_one_root: bool, expected: float
) -> None:
    assert bus_gbps(Group(size, here, 8 // here, under_one_root), hardware) == expected


def test_rings_across_nodes_share_the_network_card(hardware: Hardware) -> None:
    """One ring of all 32 ranks passes each card once; eight rings of four ranks have an eighth of it each."""
    assert bus_gbps(Group(32, 8, 1), hardware) == 3
    assert bus_gbps(Group(4, 1, 8), hardware) == 3 / 8


def test_a_fast_network_does_not_speed_up_the_inside_of_a_node(hardware: Hardware) -> None:
    assert bus_gbps(Group(32, 8, 1), hardware.with_value("network_gbps", 100)) == 5


def test_latency_is_counted_a_hop(hardware: Hardware) -> None:
    slow = hardware.with_value("node_latency_us", 10).with_value("network_latency_us", 100)
    assert all_reduce_s(0, Group(8, 8, 1), slow) == pytest.approx(2 * 7 * 10e-6)
    assert all_reduce_s(0, Group(16, 8, 1), slow) == pytest.approx(2 * (14 * 10e-6 + 100e-6))


def test_ranks_of_an_axis_sit_where_the_mesh_puts_them() -> None:
    """tp innermost: pairs under a root; dp_shard over the rest of the node; replicas across nodes."""
    cluster = ClusterConfig(num_nodes=2, ranks_per_node=8, pcie_roots=ROOTS)
    layout = Layout(pp=1, dp_replicate=2, dp_shard=4, tp=2)
    assert axis_group(layout, cluster, "tp") == Group(2, 2, 4, True)
    assert axis_group(layout, cluster, "dp_shard") == Group(4, 4, 2, False)
    assert axis_group(layout, cluster, "dp_replicate") == Group(2, 1, 8, False)


def test_pairs_that_are_neighbours_but_one_cross_no_root_of_four() -> None:
    cluster = ClusterConfig(num_nodes=1, ranks_per_node=8, pcie_roots=ROOTS)
    assert axis_group(Layout(pp=1, dp_replicate=1, dp_shard=2, tp=4), cluster, "dp_shard") == Group(2, 2, 4)
    inside = axis_group(Layout(pp=1, dp_replicate=2, dp_shard=2, tp=2), cluster, "dp_shard")
    assert inside.under_one_root


def test_no_ranks_no_time(hardware: Hardware) -> None:
    assert all_reduce_s(1e9, Group(1, 1, 8), hardware) == 0


def test_a_pipeline_boundary_of_the_32b_model_takes_13_5_ms_over_25_gbe() -> None:
    """docs/layout_32b.md: 42 MB at 3.1 GB/s."""
    hardware = find_hardware("rtx4090").with_value("network_gbps", 3.1).with_value("network_latency_us", 1e-9)
    assert send_s(2 * 4096 * 5120, hardware, between_nodes=True) == pytest.approx(13.5e-3, rel=0.01)
    assert send_s(2 * 4096 * 5120, hardware, between_nodes=True, senders=2) == pytest.approx(27e-3, rel=0.01)


def test_every_fourth_boundary_of_16_stages_on_4_nodes_leaves_a_node(hardware: Hardware) -> None:
    """PP16×TP2: 12 of 15 boundaries inside, at 10 GB/s; 3 between nodes, at half of 3 GB/s for each rank."""
    cluster = ClusterConfig(num_nodes=4, ranks_per_node=8)
    layout = Layout(pp=16, dp_replicate=1, dp_shard=1, tp=2)
    expected = (12 / 10 + 3 * 2 / 3) / 15
    assert boundary_send_s(1e9, layout, cluster, hardware) == pytest.approx(expected)
    assert boundary_send_s(1e9, Layout(pp=1, dp_replicate=1, dp_shard=4, tp=8), cluster, hardware) == 0


def test_stages_as_large_as_a_node_send_over_the_network_alone(hardware: Hardware) -> None:
    cluster = ClusterConfig(num_nodes=4, ranks_per_node=8)
    layout = Layout(pp=4, dp_replicate=1, dp_shard=1, tp=8)
    assert math.isclose(boundary_send_s(1e9, layout, cluster, hardware), 8 / 3, rel_tol=1e-6)
