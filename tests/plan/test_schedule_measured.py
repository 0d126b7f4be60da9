"""Steps of real pipelines against what the plan says of them: its simulation and its closed form.

Stages sleep a known time, so that only the schedule, its messages and what `core.pipeline` adds to it are
measured: 0.4 to 1.8 s a step, of which the tenth that is allowed is far more than a busy machine adds to the
best of three tries.
"""

from __future__ import annotations

import pytest

from hpctrain.config.schema import Schedule
from hpctrain.plan.bubble import pipeline_s
from hpctrain.plan.schedule import make_schedule, simulate
from tests.helpers.sleeping import measure_pipeline

UNIT_S = 0.03
CASES = [
    pytest.param("1f1b", 2, 4, [1, 1.5], id="1f1b, the last stage is slower"),
    pytest.param("1f1b", 4, 6, [1, 1, 1.6, 1], id="1f1b, the third of four is slower"),
    pytest.param("1f1b", 3, 2, [1.4, 1, 1], id="1f1b, fewer microbatches than stages"),
    pytest.param("gpipe", 2, 4, [1, 1.5], id="gpipe, the last stage is slower"),
    pytest.param("gpipe", 4, 6, [1.6, 1, 1, 1.2], id="gpipe, two stages are slower"),
    pytest.param("interleaved_1f1b", 2, 4, [1, 1.2, 0.8, 1.1], id="interleaved, two ranks"),
    pytest.param("interleaved_1f1b", 4, 8, [1, 1, 1, 1.2, 1, 1, 1, 1], id="interleaved, four ranks"),
]


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "pp", "count", "work"), CASES)
def test_a_step_of_uneven_stages_takes_what_the_plan_says(
    schedule: str, pp: int, count: int, work: list[float]
) -> None:
    forward, backward = [UNIT_S * each for each in work], [2 * UNIT_S * each for each in work]
    step_s, send_s = measure_pipeline(schedule, pp, count, forward_s=forward, backward_s=backward)
    actions = make_schedule(Schedule[schedule], pp, len(work) // pp, count)
    simulated = simulate(actions, forward, backward, send_s).length_s
    assert step_s == pytest.approx(simulated, rel=0.1)
    assert step_s == pytest.approx(
        pipeline_s(Schedule[schedule], pp, count, forward, backward, send_s), rel=0.1
    )
