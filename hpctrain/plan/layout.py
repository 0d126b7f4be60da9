"""Ranks and their coordinates on the mesh (pp, dp_replicate, dp_shard, tp), outermost first."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.config.schema import ParallelismConfig

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of the mesh. `filled` names the degree that was -1 in the config."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    filled: str | None = None

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel ranks: those that see different samples."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on each axis; the last axis is the fastest."""
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return position


def axes_text(layout: Layout) -> str:
    """The degrees above 1: `pp 16 × tp 2`."""
    degrees = {axis: getattr(layout, axis) for axis in AXES}
    return " × ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "one rank"


def resolve_layout(
    parallelism: ParallelismConfig, num_nodes: int, ranks_per_node: int
) -> tuple[Layout | None, list[str]]:
    """Fill in the one degree that is -1; or the findings that say why there is no layout."""
    world_size = num_nodes * ranks_per_node
    given = f"cluster.num_nodes {num_nodes} × cluster.ranks_per_node {ranks_per_node} = {world_size} ranks"
    degrees = {axis: getattr(parallelism, axis) for axis in AXES}
    wrong = [
        f"parallelism.{axis}={degree}: a degree is at least 1, or -1 to be filled in"
        for axis, degree in degrees.items()
        if degree < 1 and degree != -1
    ]
    if wrong:
        return None, wrong
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        listed = " and ".join(f"parallelism.{axis}" for axis in open_axes)
        return None, [f"{listed} are -1; only one degree can be filled in"]
    fixed = {axis: degree for axis, degree in degrees.items() if degree != -1}
    needed = math.prod(fixed.values())
    text = " × ".join(f"{axis} {degree}" for axis, degree in fixed.items())
    if open_axes and world_size % needed:
        return None, [
            f"{given}, which parallelism's {text} = {needed} does not divide; "
            "change a degree or the number of ranks"
        ]
    if not open_axes and world_size != needed:
        return None, [
            f"parallelism needs {text} = {needed} ranks, but {given}; "
            "make them equal, or set parallelism.dp_replicate=-1 to have it filled in, or "
            "parallelism.auto=true to have the layout chosen"
        ]
    if open_axes:
        degrees[open_axes[0]] = world_size // needed
    return Layout(**degrees, filled=open_axes[0] if open_axes else None), []
