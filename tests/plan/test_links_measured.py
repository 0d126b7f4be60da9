"""Collectives and messages over links of a known rate, against what the plan reckons for them.

Each node is a network namespace behind a token bucket. Gloo's all-reduce and all-gather are rings, as the
plan's are. Left out, and shown to be something else: Gloo's reduce-scatter is an all-reduce of which each
rank keeps its part. Its all-gather of two ranks sends two halves that wait for each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpctrain.core.measure import collective
from hpctrain.plan.collectives import Group, all_gather_s, all_reduce_s, reduce_scatter_s, send_s
from tests.helpers.links import Links, limited_links, missing_links
from tests.helpers.ranks import run_ranks

SIZES = (3 * 2**19, 3 * 2**20)  # bytes, which 2, 3 and 4 ranks can share; the bucket holds 64 KiB
RATE = 25e6  # bytes a second: the cores have nothing to do
REPEATS = 4
TOLERANCE = 0.1
# Of a hop through virtual cards and a bridge; a hundredth of what is measured. Within a namespace bytes are
# copied, a hundred times faster than the bucket lets them out.
FIGURES = {"network_latency_us": 30.0, "node_latency_us": 30.0, "node2_gbps": 4.0}

PLANNED: dict[str, Callable[..., float]] = {
    "all_reduce": all_reduce_s,
    "all_gather": all_gather_s,
    "reduce_scatter": reduce_scatter_s,
}
Times = dict[tuple[str, int], float]


@pytest.fixture(scope="module")
def _links() -> None:
    if reason := missing_links():
        pytest.fail(reason) if os.environ.get("CI") and "iproute2" in reason else pytest.skip(reason)


def take_times(rank: int, world: int, links: Links, groups: list[list[int]]) -> Times:
    """Seconds of each collective and message by size, until the last rank ends; all groups at once. The best
    of a few: a link is never faster than its bucket, but others use the cores too."""
    links.enter(rank * len(links.names) // world)
    made = [dist.new_group(ranks, backend="gloo") for ranks in groups]
    (group,) = [group for group, ranks in zip(made, groups, strict=True) if rank in ranks]
    times = {}
    for size in SIZES:
        works: dict[str, Any] = {what: collective(what, size, group, torch.device("cpu")) for what in PLANNED}
        works["send"] = _message(rank, groups[0], size, group)
        for what, work in works.items():
            work()
            seconds = torch.empty(REPEATS, dtype=torch.float64)
            for index in range(REPEATS):
                dist.barrier()
                start = time.perf_counter()
                work()
                seconds[index] = time.perf_counter() - start
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times[what, size] = float(seconds.min())
    return times


def _message(rank: int, ranks: list[int], size: int, group: Any) -> Callable[[], None]:
    """From the first rank of the first group to its second."""
    buffer = torch.zeros(size // 4)

    def work() -> None:
        if rank == ranks[0]:
            dist.send(buffer, ranks[1], group=group)
        elif rank == ranks[1]:
            dist.recv(buffer, ranks[0], group=group)

    return work


@cache
def measured(nodes: int, per_node: int = 1, across: bool = False) -> tuple[Times, dict[str, float]]:
    """Times, and the figures of the links they were taken on.

    Args:
        across: Each group has one rank of a node; else all ranks are one group.
    """
    world = nodes * per_node
    groups = (
        [list(range(rank, world, per_node)) for rank in range(per_node)] if across else [list(range(world))]
    )
    with limited_links(nodes, rate_bytes_s=RATE) as links:
        times = run_ranks(world, take_times, links, groups)[0]
    return times, {**FIGURES, "network_gbps": links.payload_bytes_s / 1e9}


def case(what: str, nodes: int, size: int) -> Any:
    return pytest.param(what, nodes, size, marks=[] if nodes == 4 else pytest.mark.long)


@pytest.mark.usefixtures("_links")
@pytest.mark.parametrize(
    ("what", "nodes", "size"),
    [
        *(case("all_reduce", nodes, size) for nodes in (2, 3, 4) for size in SIZES),
        # In small all-gathers a late rank shows: their steps wait for each other.
        *(case("all_gather", nodes, SIZES[-1]) for nodes in (3, 4)),
    ],
)
def test_a_ring_between_nodes_takes_what_the_plan_says(what: str, nodes: int, size: int) -> None:
    times, figures = measured(nodes)
    planned = PLANNED[what](size, Group(nodes, 1, 1), figures)
    assert times[what, size] == pytest.approx(planned, rel=TOLERANCE)


@pytest.mark.usefixtures("_links")
@pytest.mark.parametrize("size", SIZES)
def test_a_message_between_nodes_takes_what_the_plan_says(size: int) -> None:
    times, figures = measured(4)
    assert times["send", size] == pytest.approx(send_s(size, figures, between_nodes=True), rel=TOLERANCE)


@pytest.mark.long
@pytest.mark.usefixtures("_links")
@pytest.mark.parametrize("size", SIZES)
def test_groups_that_cross_nodes_at_once_share_the_card_of_a_node(size: int) -> None:
    times, figures = measured(2, per_node=2, across=True)
    planned = all_reduce_s(size, Group(2, 1, 2), figures)
    assert times["all_reduce", size] == pytest.approx(planned, rel=TOLERANCE)


@pytest.mark.long
@pytest.mark.usefixtures("_links")
@pytest.mark.parametrize("what", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("size", SIZES)
def test_a_ring_over_nodes_of_two_goes_through_each_card_once(what: str, size: int) -> None:
    times, figures = measured(2, per_node=2)
    planned = PLANNED[what](size, Group(4, 2, 1), figures)
    assert times[what, size] == pytest.approx(planned, rel=TOLERANCE)


@pytest.mark.usefixtures("_links")
@pytest.mark.parametrize("nodes", [pytest.param(2, marks=pytest.mark.long), 4])
def test_gloos_reduce_scatter_is_an_all_reduce(nodes: int) -> None:
    """Why it is left out above: NCCL's moves half as much."""
    times, figures = measured(nodes)
    planned = all_reduce_s(SIZES[-1], Group(nodes, 1, 1), figures)
    assert times["reduce_scatter", SIZES[-1]] == pytest.approx(planned, rel=TOLERANCE)
