"""What follows the end of an attempt, over the whole table of causes and states of the job."""

from __future__ import annotations

import itertools

import pytest

from hpctrain.config.schema import BudgetConfig
from hpctrain.launch.decide import Action, JobStatus, decide, refuse_start
from hpctrain.run.causes import AttemptCause, CauseKind
from hpctrain.run.ledger import Attempt

K, S, A = CauseKind, JobStatus, Action
BUDGET = BudgetConfig(crash=2, node_failure=3, hang=1, preemption=4, time_limit=4, no_progress=10)
ENDS_THE_RUN = {A.done, A.stop, A.fail, A.leave}


def attempt(kind: CauseKind, restored: int | None = None, saved: int | None = None) -> Attempt:
    return Attempt("x", {"attempt": "x"}, {"cause": kind}, restored, saved)


def outcome(
    history: list[Attempt], status: JobStatus = S.running, budget: BudgetConfig = BUDGET
) -> tuple[Action, str]:
    """The decision on a history whose last attempt has just ended."""
    assert history[-1].end is not None
    decision = decide(AttemptCause(history[-1].end["cause"], "what happened"), history, budget, status)
    return decision.action, decision.reason


@pytest.mark.parametrize(
    ("kind", "progressed", "length"), list(itertools.product(K, (True, False), (1, 3))), ids=str
)
def test_a_scancel_is_never_undone(kind: CauseKind, progressed: bool, length: int) -> None:
    history = [attempt(kind, saved=5 if progressed else None)] * length
    for budget in (BUDGET, BudgetConfig(crash=10**6, node_failure=10**6, no_progress=10**6)):
        action, _ = outcome(history, S.cancelled, budget)
        assert action is (A.done if kind is K.done else A.stop)


@pytest.mark.parametrize("kind", K, ids=str)
def test_a_local_run_that_was_interrupted_is_never_started_again(kind: CauseKind) -> None:
    action, _ = outcome([attempt(kind, saved=5)], S.interrupted)
    assert action is (A.done if kind is K.done else A.stop)


@pytest.mark.parametrize("status", [S.timed_out, S.preempted])
def test_a_job_that_is_about_to_end_is_requeued_and_not_relaunched_into(status: JobStatus) -> None:
    for kind in (K.crash, K.preemption, K.killed):
        assert outcome([attempt(kind, saved=5)], status)[0] is A.requeue


def test_an_unreachable_controller_is_named_and_is_no_scancel() -> None:
    action, reason = outcome([attempt(K.crash, saved=5)], S.unreachable)
    assert action is A.fail and "controller" in reason


def test_starts_that_slurm_repeats_meet_the_budgets_too() -> None:
    lost = attempt(K.lost, saved=5)
    assert refuse_start([], BUDGET) is None
    assert refuse_start([lost] * 1 + [attempt(K.lost)] * 2, BUDGET) is None
    refusal = refuse_start([lost] * 1 + [attempt(K.lost)] * 3, BUDGET)
    assert refusal is not None and refusal.action is A.fail and "node_failure" in refusal.reason
    idle = [attempt(K.preemption)] * 10
    assert refuse_start(idle[:9], BUDGET) is None
    refusal = refuse_start(idle, BUDGET)
    assert refusal is not None and "no progress in 10 attempts" in refusal.reason


@pytest.mark.parametrize("kind", K, ids=str)
def test_what_slurm_has_taken_back_is_left_to_slurm(kind: CauseKind) -> None:
    action, _ = outcome([attempt(kind)], S.leaving)
    assert action is {K.done: A.done, K.stop_file: A.stop}.get(kind, A.leave)


# With progress behind it and nothing used up: cause, in an allocation, without Slurm.
TABLE = [
    (K.done, A.done, A.done),
    (K.stop_file, A.stop, A.stop),
    (K.preemption, A.requeue, A.stop),
    (K.time_limit, A.requeue, A.stop),
    (K.crash, A.relaunch, A.relaunch),
    (K.out_of_memory, A.relaunch, A.relaunch),
    (K.killed, A.relaunch, A.relaunch),
    (K.peer_lost, A.relaunch, A.relaunch),
    (K.hang, A.relaunch, A.relaunch),
    (K.node_failure, A.requeue, A.relaunch),
]


@pytest.mark.parametrize(("kind", "in_slurm", "local"), TABLE, ids=str)
def test_each_cause_has_its_answer(kind: CauseKind, in_slurm: Action, local: Action) -> None:
    history = [attempt(kind, saved=5)]
    assert outcome(history, S.running)[0] is in_slurm
    assert outcome(history, S.none)[0] is local


BUDGETS = [
    (K.crash, "crash"),
    (K.out_of_memory, "crash"),
    (K.killed, "crash"),
    (K.peer_lost, "crash"),
    (K.hang, "hang"),
    (K.node_failure, "node_failure"),
    (K.preemption, "preemption"),
    (K.time_limit, "time_limit"),
]


@pytest.mark.parametrize(("kind", "name"), BUDGETS, ids=str)
def test_a_cause_ends_the_run_once_its_own_budget_is_used_up(kind: CauseKind, name: str) -> None:
    limit = getattr(BUDGET, name)
    for used in range(1, limit + 1):
        assert outcome([attempt(kind)] * used)[0] not in ENDS_THE_RUN
    action, reason = outcome([attempt(kind)] * (limit + 1))
    assert action is A.fail
    assert f"budget.{name}={limit}" in reason and "what happened" in reason


def test_a_budget_of_zero_allows_no_second_start() -> None:
    assert outcome([attempt(K.crash)], budget=BudgetConfig(crash=0))[0] is A.fail


def test_progress_refills_the_budget() -> None:
    worn = [attempt(K.crash), attempt(K.crash)]
    assert outcome([*worn, attempt(K.crash)])[0] is A.fail
    assert outcome([*worn, attempt(K.crash, restored=5, saved=9)])[0] is A.relaunch
    assert outcome([*worn, attempt(K.preemption, saved=9), attempt(K.crash)])[0] is A.relaunch


def test_saving_the_restored_step_again_is_no_progress() -> None:
    worn = [attempt(K.crash), attempt(K.crash)]
    assert outcome([*worn, attempt(K.crash, restored=9, saved=9)])[0] is A.fail


def test_a_crash_at_the_same_step_ends_the_run_though_its_first_attempt_progressed() -> None:
    history = [attempt(K.crash, saved=5)]
    actions = []
    while len(history) < 6:
        actions.append(outcome(history)[0])
        history.append(attempt(K.crash, restored=5))
    assert actions == [A.relaunch, A.relaunch, A.fail, A.fail, A.fail]


def test_other_causes_do_not_use_up_a_budget() -> None:
    history = [attempt(K.hang), attempt(K.preemption), attempt(K.node_failure), attempt(K.crash)]
    assert outcome(history)[0] is A.relaunch


def test_lost_starts_count_as_lost_nodes() -> None:
    history = [attempt(K.lost)] * 3 + [attempt(K.node_failure)]
    action, reason = outcome(history)
    assert action is A.fail and "budget.node_failure=3" in reason


@pytest.mark.parametrize("kind", [K.preemption, K.time_limit, K.node_failure, K.crash, K.hang], ids=str)
def test_no_progress_in_n_attempts_ends_the_run_whatever_the_cause(kind: CauseKind) -> None:
    plenty = BudgetConfig(crash=99, hang=99, node_failure=99, preemption=99, time_limit=99, no_progress=3)
    mixed = [attempt(K.preemption), attempt(K.crash)]
    assert outcome([*mixed[:1], attempt(kind)], budget=plenty)[0] not in ENDS_THE_RUN
    action, reason = outcome([*mixed, attempt(kind)], budget=plenty)
    assert action is A.fail and "no progress in 3 attempts" in reason
    assert outcome([*mixed, attempt(kind, saved=1)], budget=plenty)[0] not in ENDS_THE_RUN


def test_a_run_that_is_interrupted_without_slurm_stops() -> None:
    assert outcome([attempt(K.preemption)], S.none) == (A.stop, "interrupted")
