"""The closed form of a pipeline's time against the simulation of its schedule."""

from __future__ import annotations

import random

import pytest

from hpctrain.config.schema import Schedule
from hpctrain.plan.bubble import pipeline_s
from hpctrain.plan.schedule import make_schedule, simulate


def simulated_s(
    schedule: str, pp: int, m: int, forward_s: list[float], backward_s: list[float], send_s: float
) -> float:
    actions = make_schedule(Schedule[schedule], pp, len(forward_s) // pp, m)
    return simulate(actions, forward_s, backward_s, send_s).length_s


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_even_stages_take_m_plus_p_minus_1_microbatches(schedule: str) -> None:
    """Narayanan et al. 2021, §2.2: bubble (p - 1) (f + b)."""
    assert pipeline_s(Schedule[schedule], 4, 8, [1.0] * 4, [2.0] * 4) == pytest.approx(3 * (8 + 4 - 1))


def test_interleaved_stages_have_a_bubble_that_is_smaller_by_their_number() -> None:
    """Narayanan et al. 2021, §2.2: bubble (p - 1) (f + b) / v."""
    time = pipeline_s(Schedule["interleaved_1f1b"], 4, 8, [0.5] * 8, [1.0] * 8)
    assert time == pytest.approx(3 * 8 + 3 * 3 / 2)


def test_one_rank_works_without_a_pause() -> None:
    assert pipeline_s(Schedule["1f1b"], 1, 5, [1.0], [2.0], 9.0) == 15.0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_uneven_stages_with_sends_are_within_3_percent_of_the_simulation(schedule: str) -> None:
    draw = random.Random(0)
    errors = []
    for _ in range(150):
        pp = draw.choice([2, 3, 4, 8])
        per_rank = draw.choice([2, 3]) if schedule == "interleaved_1f1b" else 1
        m = pp * draw.randint(2, 6) if per_rank > 1 else draw.randint(1, 40)
        forward = [draw.uniform(0.9, 1.1) for _ in range(pp * per_rank)]
        backward = [draw.uniform(2.2, 2.8) * one for one in forward]
        send = draw.choice([0.0, 0.02, 0.1])
        exact = simulated_s(schedule, pp, m, forward, backward, send)
        errors.append(abs(pipeline_s(Schedule[schedule], pp, m, forward, backward, send) / exact - 1))
    assert max(errors) < (1e-9 if schedule == "gpipe" else 0.03)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("slow", [0, 3, 7])
def test_one_slow_stage_is_within_3_percent_wherever_it_is(schedule: str, slow: int) -> None:
    forward, backward = [1.0] * 8, [2.0] * 8
    forward[slow], backward[slow] = 2.0, 4.5
    exact = simulated_s(schedule, 8, 24, forward, backward, 0.1)
    assert pipeline_s(Schedule[schedule], 8, 24, forward, backward, 0.1) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("slow", [8, 9])
def test_slow_sends_and_a_slow_stage_are_within_3_percent_for_interleaved_stages(slow: int) -> None:
    forward, backward = [1.0] * 16, [2.0] * 16
    forward[slow], backward[slow] = {8: 2.0, 9: 1.3}[slow], 3.0
    exact = simulated_s("interleaved_1f1b", 8, 24, forward, backward, 1.0)
    closed = pipeline_s(Schedule["interleaved_1f1b"], 8, 24, forward, backward, 1.0)
    assert closed == pytest.approx(exact, rel=0.03)
