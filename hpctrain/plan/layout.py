"""Ranks and their coordinates on the mesh (pp, dp_replicate, dp_shard, tp), outermost first."""

from __future__ import annotations

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


def resolve_layout(parallelism: ParallelismConfig, world_size: int) -> tuple[Layout | None, list[str]]:
    """Fill in the one degree that is -1; or the findings that say why there is no layout."""
    degrees = {axis: getattr(parallelism, axis) for axis in AXES}
    wrong = [
        f"parallelism.{a}={d}: a degree is at least 1, or -1 to be filled in"
        for a, d in degrees.items()
        if d < 1 and d != -1
    ]
    if wrong:
        return None, wrong
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        return None, [f"parallelism: {' and '.join(open_axes)} are both -1; only one degree can be filled in"]
    product = 1
    for degree in degrees.values():
        product *= degree if degree > 0 else 1
    if open_axes:
        if world_size % product:
            return None, [
                f"{world_size} ranks cannot be divided by the other degrees ({product}); change one of them or cluster.num_nodes"
            ]
        degrees[open_axes[0]] = world_size // product
    elif product != world_size:
        text = " × ".join(f"{axis} {degree}" for axis, degree in degrees.items())
        return None, [
            f"{text} = {product} ranks, but the cluster gives {world_size} (nodes × ranks_per_node); make them equal or set dp_replicate=-1"
        ]
    return Layout(**degrees, filled=open_axes[0] if open_axes else None), []
