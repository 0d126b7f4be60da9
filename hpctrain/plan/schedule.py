"""Pipeline schedules as data: what each rank does, in order. `core.pipeline` does it, `simulate` times it.

Stage `s` is on pipeline rank `s % pp`: with several stages a rank, neighbours in the pipeline are neighbours
on the mesh (Narayanan et al. 2021, §2.2). Zero-bubble schedules are not offered: split backward passes do not
compose with per-block sharding (wrong gradients were measured), and their gain needs no-recompute blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from hpctrain.config.schema import Schedule


class Pass(Enum):
    """Direction of a microbatch through a stage."""

    forward = "F"
    backward = "B"


class Action(NamedTuple):
    """One microbatch through one stage."""

    kind: Pass
    stage: int
    microbatch: int


Actions = tuple[Action, ...]


@lru_cache(maxsize=256)  # a search asks for the same ones
def make_schedule(
    schedule: Schedule, pp: int, stages_per_rank: int, num_microbatches: int
) -> tuple[Actions, ...]:
    """Return the actions of each pipeline rank.

    GPipe (Huang et al. 2019): all forwards, then all backwards. 1F1B (Narayanan et al. 2021, §2.2): rank `r`
    runs `pp - r - 1` forwards ahead, then alternates. Interleaved 1F1B: the same over groups of `pp`
    microbatches, which visit a rank's stages in turn; it needs `num_microbatches` to be a multiple of `pp`.
    """
    return tuple(
        _alternate(
            _order(Pass.forward, rank, pp, stages_per_rank, num_microbatches),
            _order(Pass.backward, rank, pp, stages_per_rank, num_microbatches),
            _num_ahead(schedule, rank, pp, stages_per_rank),
        )
        for rank in range(pp)
    )


def make_forward_schedule(pp: int, stages_per_rank: int, num_microbatches: int) -> tuple[Actions, ...]:
    """Return the forwards alone, for evaluation."""
    return tuple(
        tuple(_order(Pass.forward, rank, pp, stages_per_rank, num_microbatches)) for rank in range(pp)
    )


def _order(kind: Pass, rank: int, pp: int, stages_per_rank: int, num_microbatches: int) -> list[Action]:
    """The order in which one rank's stages see the microbatches: groups of `pp`, each through all stages."""
    stages = [chunk * pp + rank for chunk in range(stages_per_rank)]
    if kind is Pass.backward:
        stages.reverse()
    return [
        Action(kind, stage, microbatch)
        for first in range(0, num_microbatches, pp)
        for stage in stages
        for microbatch in range(first, min(first + pp, num_microbatches))
    ]


def _num_ahead(schedule: Schedule, rank: int, pp: int, stages_per_rank: int) -> int | None:
    """Forwards before the first backward; None for all."""
    if schedule is Schedule["gpipe"]:
        return None
    if schedule is Schedule["1f1b"]:
        return pp - rank - 1
    return (pp - rank - 1) * 2 + (stages_per_rank - 1) * pp


def _alternate(forwards: list[Action], backwards: list[Action], num_ahead: int | None) -> Actions:
    ahead = len(forwards) if num_ahead is None else min(num_ahead, len(forwards))
    actions = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [forward, backward]
    return (*actions, *backwards[len(forwards) - ahead :])


@dataclass(frozen=True)
class Timeline:
    """When each action ran, seconds from the start, and what that means."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]  #: of each rank: action, begin, end
    peak_in_flight: tuple[int, ...]  #: of each rank: most microbatches between forward and backward

    @property
    def length_s(self) -> float:
        return max(end for rank in self.spans for _, _, end in rank)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they do nothing."""
        busy = sum(end - begin for rank in self.spans for _, begin, end in rank)
        return 1.0 - busy / (self.length_s * len(self.spans))


def simulate(
    schedule: Sequence[Actions],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: float = 0.0,
) -> Timeline:
    """Time a schedule whose stages take `forward_s[stage]` and `backward_s[stage]` for a microbatch.

    Raises:
        ValueError: the ranks would wait for each other forever.
    """
    num_stages = len(forward_s)
    done: dict[Action, float] = {}
    clocks, positions = [0.0] * len(schedule), [0] * len(schedule)
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in schedule]
    while any(position < len(actions) for position, actions in zip(positions, schedule, strict=True)):
        moved = False
        for rank, actions in enumerate(schedule):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                needed = _needs(action, num_stages)
                if needed is not None and needed not in done:
                    break
                cost = (forward_s if action.kind is Pass.forward else backward_s)[action.stage]
                travel = send_s if needed is not None and needed.stage != action.stage else 0.0
                begin = max(clocks[rank], done[needed] + travel) if needed is not None else clocks[rank]
                clocks[rank] = done[action] = begin + cost
                spans[rank].append((action, begin, begin + cost))
                positions[rank] += 1
                moved = True
        if not moved:
            raise ValueError("the schedule blocks itself")
    return Timeline(tuple(map(tuple, spans)), tuple(_peak_in_flight(actions) for actions in schedule))


def _needs(action: Action, num_stages: int) -> Action | None:
    """What must have been done, elsewhere or before, for an action to have its input."""
    kind, stage, microbatch = action
    if kind is Pass.forward:
        return Action(kind, stage - 1, microbatch) if stage else None
    if stage == num_stages - 1:
        return Action(Pass.forward, stage, microbatch)
    return Action(kind, stage + 1, microbatch)


def _peak_in_flight(actions: Actions) -> int:
    peak = now = 0
    for action in actions:
        now += 1 if action.kind is Pass.forward else -1
        peak = max(peak, now)
    return peak
