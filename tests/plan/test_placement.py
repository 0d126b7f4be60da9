"""Where ranks sit, on a described topology: 4 nodes of 8 GPUs, four under each of two PCIe roots."""

from __future__ import annotations

import pytest

from hpctrain.config.schema import ClusterConfig
from hpctrain.errors import PlanError
from hpctrain.plan.layout import Layout
from hpctrain.plan.placement import axis_groups, gpu_number, place, placement_findings, placement_notes
from hpctrain.plan.plan import make_plan
from tests.plan.test_decoder_legality import decoder

STRAIGHT = [[0, 1, 2, 3], [4, 5, 6, 7]]
CROSSED = [[0, 2, 4, 6], [1, 3, 5, 7]]  # boards that number GPUs in turns


def cluster(pcie_roots: list[list[int]], num_nodes: int = 4) -> ClusterConfig:
    return ClusterConfig(num_nodes=num_nodes, ranks_per_node=8, pcie_roots=pcie_roots)


def layout(pp: int = 1, dp_replicate: int = 1, dp_shard: int = 1, tp: int = 1) -> Layout:
    return Layout(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)


def test_the_32b_layout_has_four_stages_on_a_node() -> None:
    """PP16 × TP2 over 32 ranks, by hand: rank 2 s + t is stage s, half t."""
    for rank in range(32):
        node, local_rank, position = place(layout(pp=16, tp=2), rank, 8)
        assert position == {"pp": rank // 2, "dp_replicate": 0, "dp_shard": 0, "tp": rank % 2}
        assert node == position["pp"] // 4
        assert local_rank == 2 * (position["pp"] % 4) + position["tp"]


@pytest.mark.parametrize("roots", [STRAIGHT, CROSSED], ids=["straight", "crossed"])
def test_tensor_parallel_pairs_share_a_node_and_a_pcie_root(roots: list[list[int]]) -> None:
    described = cluster(roots)
    for first, second in axis_groups(layout(pp=16, tp=2), "tp"):
        assert first // 8 == second // 8
        gpus = {gpu_number(described, rank % 8) for rank in (first, second)}
        assert any(gpus <= set(root) for root in roots)
    assert placement_notes(described, layout(pp=16, tp=2)) == ["pp across nodes · tp under a PCIe root"]


def test_each_rank_of_a_node_has_a_gpu_of_its_own() -> None:
    for roots in (STRAIGHT, CROSSED, []):
        assert sorted(gpu_number(cluster(roots), rank) for rank in range(8)) == list(range(8))
    assert [gpu_number(cluster([]), rank) for rank in range(8)] == list(range(8))


def test_tensor_parallel_ranks_on_two_roots_are_warned_of() -> None:
    notes = placement_notes(cluster(STRAIGHT), layout(pp=4, tp=8))
    assert notes[0] == "pp across nodes · tp in a node"
    assert "tp crosses PCIe roots" in notes[1]


def test_nobody_is_warned_of_roots_that_are_not_described() -> None:
    assert placement_notes(cluster([]), layout(pp=4, tp=8)) == ["pp across nodes · tp in a node"]


def test_shards_across_nodes_are_warned_of_and_replicas_are_not() -> None:
    assert "dp_shard crosses nodes" in placement_notes(cluster(STRAIGHT), layout(dp_shard=32))[1]
    assert placement_notes(cluster(STRAIGHT), layout(dp_replicate=4, dp_shard=8)) == [
        "dp_replicate across nodes · dp_shard in a node"
    ]


def test_tensor_parallel_ranks_on_two_nodes_are_refused() -> None:
    for per_node, tp in ((8, 16), (6, 4)):
        described = ClusterConfig(num_nodes=4, ranks_per_node=per_node)
        (finding,) = placement_findings(described, layout(tp=tp, pp=4 * per_node // tp))
        assert f"parallelism.tp={tp} with cluster.ranks_per_node={per_node}" in finding
    assert placement_findings(cluster([]), layout(pp=4, tp=8)) == []


@pytest.mark.parametrize(
    "roots", [[[0, 1]], [[0, 1, 2, 3], [3, 4, 5, 6]], [[*range(9)]], [[*range(7)], [8]]], ids=str
)
def test_a_description_that_misses_a_gpu_is_refused(roots: list[list[int]]) -> None:
    (finding,) = placement_findings(cluster(roots), layout(dp_replicate=32))
    assert "each of the 8 GPUs of a node (0 to 7" in finding


def test_the_plan_shows_the_places_and_refuses_with_the_rest() -> None:
    config = decoder(4, parallelism__pp=2, parallelism__tp=2)
    config.cluster.pcie_roots = [[0, 2], [1, 3]]
    assert any("pp in a node · tp under a PCIe root" in line for line in make_plan(config).lines())
    config.cluster.pcie_roots = [[0, 2]]
    with pytest.raises(PlanError, match=r"cluster\.pcie_roots=\[\[0, 2\]\]"):
        make_plan(config)
