"""Ranks, degrees and coordinates."""

from __future__ import annotations

import itertools
import math

import pytest

from hpctrain.config.schema import ParallelismConfig
from hpctrain.plan.layout import AXES, Layout, resolve_layout


def degrees(layout: Layout) -> tuple[int, ...]:
    return tuple(getattr(layout, axis) for axis in AXES)


@pytest.mark.parametrize("axis", AXES)
def test_one_degree_of_minus_one_is_filled_with_what_is_left(axis: str) -> None:
    others = {name: 2 for name in AXES if name != axis}
    layout, findings = resolve_layout(
        ParallelismConfig(**{**others, axis: -1}), num_nodes=3, ranks_per_node=8
    )
    assert findings == [] and layout is not None
    assert getattr(layout, axis) == 24 // 8 and layout.filled == axis
    assert layout.world_size == 24


def test_degrees_that_are_all_given_are_kept() -> None:
    layout, findings = resolve_layout(ParallelismConfig(pp=2, dp_replicate=3, dp_shard=1, tp=4), 3, 8)
    assert findings == [] and layout is not None
    assert degrees(layout) == (2, 3, 1, 4) and layout.filled is None and layout.dp == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dp_replicate": 3}, ["dp_replicate 3", "= 3 ranks", "2 × cluster.ranks_per_node 8 = 16 ranks"]),
        ({"dp_replicate": 32}, ["dp_replicate 32", "= 32 ranks", "16 ranks"]),
        ({"tp": 3}, ["16 ranks", "tp 3 = 3 does not divide"]),
        ({"dp_replicate": -1, "tp": -1}, ["parallelism.dp_replicate and parallelism.tp are -1", "only one"]),
        ({"pp": 0}, ["parallelism.pp=0", "at least 1"]),
        ({"dp_replicate": -2, "tp": 0}, ["parallelism.dp_replicate=-2", "parallelism.tp=0"]),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_arithmetic(
    given: dict[str, int], words: list[str]
) -> None:
    layout, findings = resolve_layout(ParallelismConfig(**given), num_nodes=2, ranks_per_node=8)
    assert layout is None
    said = "\n".join(findings)
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 3), repeat=4)))
def test_coordinates_are_a_bijection_with_the_last_axis_fastest(sizes: tuple[int, ...]) -> None:
    layout = Layout(**dict(zip(AXES, sizes, strict=True)))
    found = [tuple(layout.coordinates(rank)[axis] for axis in AXES) for rank in range(layout.world_size)]
    # itertools counts like an odometer, last digit fastest: rank order by definition.
    assert found == list(itertools.product(*map(range, sizes)))
    assert layout.world_size == math.prod(sizes)
