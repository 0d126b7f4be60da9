"""Pipeline schedules: complete, free of deadlock, with the bubble and memory that the papers give."""

from __future__ import annotations

import itertools

import pytest

from hpctrain.config.schema import Schedule
from hpctrain.plan.schedule import Action, Pass, make_forward_schedule, make_schedule, simulate

SHAPES = [
    (schedule, pp, 1, m)
    for schedule in (Schedule["gpipe"], Schedule["1f1b"])
    for pp, m in itertools.product((1, 2, 3, 4, 8), (1, 2, 5, 8, 16))
] + [
    (Schedule["interleaved_1f1b"], pp, v, k * pp)
    for pp, v, k in itertools.product((2, 3, 4, 8), (2, 3), (1, 2, 3))
]


@pytest.mark.parametrize(("schedule", "pp", "chunks", "microbatches"), SHAPES)
def test_every_microbatch_passes_every_stage_once_each_way_and_no_rank_waits_forever(
    schedule: Schedule, pp: int, chunks: int, microbatches: int
) -> None:
    ranks = make_schedule(schedule, pp, chunks, microbatches)
    everything = [action for rank in ranks for action in rank]
    assert len(everything) == len(set(everything)) == 2 * pp * chunks * microbatches
    assert all(action.stage % pp == rank for rank, actions in enumerate(ranks) for action in actions)
    simulate(ranks, [1.0] * pp * chunks, [2.0] * pp * chunks)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 4), (8, 32)])
@pytest.mark.parametrize("schedule", [Schedule["gpipe"], Schedule["1f1b"]])
def test_the_bubble_is_the_published_one(schedule: Schedule, pp: int, microbatches: int) -> None:
    ranks = make_schedule(schedule, pp, 1, microbatches)
    timeline = simulate(ranks, [1.0] * pp, [2.0] * pp)
    assert timeline.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1))


@pytest.mark.parametrize(("pp", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 4, 16)])
def test_interleaving_divides_the_bubble_by_the_stages_a_rank(
    pp: int, chunks: int, microbatches: int
) -> None:
    ranks = make_schedule(Schedule["interleaved_1f1b"], pp, chunks, microbatches)
    timeline = simulate(ranks, [1.0 / chunks] * pp * chunks, [2.0 / chunks] * pp * chunks)
    # Narayanan et al. 2021, §2.2.2: the idle time is (pp - 1)(f + b) / chunks, the work m(f + b).
    idle = (pp - 1) * 3.0 / chunks
    assert timeline.length_s == pytest.approx(3.0 * microbatches + idle)


def test_1f1b_holds_as_many_microbatches_as_stages_follow_and_gpipe_all() -> None:
    assert simulate(make_schedule(Schedule["1f1b"], 4, 1, 8), [1.0] * 4, [2.0] * 4).peak_in_flight == (
        4,
        3,
        2,
        1,
    )
    gpipe = simulate(make_schedule(Schedule["gpipe"], 4, 1, 8), [1.0] * 4, [2.0] * 4)
    assert gpipe.peak_in_flight == (8, 8, 8, 8)


def test_a_schedule_that_blocks_itself_is_noticed() -> None:
    backward_first = (Action(Pass.backward, 0, 0), Action(Pass.forward, 0, 0))
    with pytest.raises(ValueError, match="blocks itself"):
        simulate([backward_first], [1.0], [1.0])


def test_evaluation_has_the_forwards_alone_in_the_same_order() -> None:
    both = make_schedule(Schedule["interleaved_1f1b"], 2, 2, 4)
    forwards = tuple(tuple(a for a in rank if a.kind is Pass.forward) for rank in both)
    assert make_forward_schedule(2, 2, 4) == forwards
