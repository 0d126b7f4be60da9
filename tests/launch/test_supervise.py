"""Giving a job back to the queue: never against a scancel, whenever that comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain import slurm
from hpctrain.config.schema import Config
from hpctrain.errors import ClusterError, PlanError
from hpctrain.launch import supervise
from hpctrain.launch.decide import Action, Decision, JobStatus
from hpctrain.launch.environment import Allocation
from hpctrain.launch.supervise import Supervisor
from hpctrain.plan.plan import make_plan
from hpctrain.run.causes import AttemptCause, CauseKind
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exhausted import find_out_of_memory
from hpctrain.slurm.records import JobInfo

WANTED = Decision(Action.requeue, "preemption")


def job_info(state: str = "RUNNING", restarts: int = 0, end_s: float = 1e12) -> JobInfo:
    return JobInfo(
        job_id="7", raw_id="7", name="x", state=state, reason="", exit_code=0, signal=0, restarts=restarts,
        can_requeue=True, partition="p", nodes="n0", batch_host="n0", time_limit_s=600, start_time_s=1000.0,
        end_time_s=end_s, preempt_time_s=None, work_dir="",
    )  # fmt: skip


class FakeSlurm:
    """Answers as scripted; counts what it was asked to do."""

    def __init__(self, *states: JobInfo | None, requeue_errors: int = 0) -> None:
        self.states, self.requeue_errors, self.requeued = list(states), requeue_errors, 0

    def job(self, number: str) -> JobInfo | None:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def requeue(self, number: str) -> None:
        self.requeued += 1
        if self.requeue_errors:
            self.requeue_errors -= 1
            raise ClusterError("asked Slurm to requeue", "Unable to contact slurm controller")


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    monkeypatch.setattr(supervise.time, "sleep", lambda seconds: None)
    config, run = Config(), RunDirectory(tmp_path / "runs" / "city")
    run.create()
    return Supervisor(run, config, make_plan(config), Allocation("7", 0, "n0"))


def pretend(monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm) -> FakeSlurm:
    monkeypatch.setattr(slurm, "job", fake.job)
    monkeypatch.setattr(slurm, "requeue", fake.requeue)
    return fake


def test_a_running_job_is_requeued_once(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = pretend(monkeypatch, FakeSlurm(job_info()))
    assert supervisor.requeue(WANTED) is WANTED
    assert fake.requeued == 1


@pytest.mark.parametrize(
    "last", [job_info("COMPLETING", end_s=1100.0), job_info("CANCELLED", end_s=1100.0), None]
)
def test_a_scancel_after_the_decision_is_not_undone(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, last: JobInfo | None
) -> None:
    fake = pretend(monkeypatch, FakeSlurm(last))
    assert supervisor.requeue(WANTED).action is Action.stop
    assert fake.requeued == 0


def test_a_signal_after_the_decision_is_a_scancel_too(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = pretend(monkeypatch, FakeSlurm(job_info()))
    supervisor.signalled = 15
    assert supervisor.requeue(WANTED).action is Action.stop
    assert fake.requeued == 0


def test_a_scancel_while_the_controller_is_away_is_not_undone_by_the_next_try(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = pretend(monkeypatch, FakeSlurm(job_info(), job_info("COMPLETING", end_s=1100.0), requeue_errors=1))
    assert supervisor.requeue(WANTED).action is Action.stop
    assert fake.requeued == 1


def test_a_job_that_slurm_brings_back_itself_is_left_to_it(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = pretend(monkeypatch, FakeSlurm(job_info("COMPLETING", restarts=1)))
    assert supervisor.requeue(WANTED).action is Action.leave
    assert fake.requeued == 0


@pytest.mark.parametrize(
    ("end_s", "status"),
    [(1590.0, JobStatus.cancelled), (1600.0, JobStatus.timed_out), (1630.0, JobStatus.timed_out)],
)
def test_a_scancel_just_before_the_time_limit_is_told_from_the_limit_itself(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, end_s: float, status: JobStatus
) -> None:
    """A limit of 600 s from 1000 on; EndTime is when Slurm ended the job (seen on 22.05: 67 s for 60)."""
    pretend(monkeypatch, FakeSlurm(job_info("COMPLETING", end_s=end_s)))
    assert supervisor.job_status() is status


def test_a_controller_that_is_away_is_asked_again(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([ClusterError("asked", "no answer"), ClusterError("asked", "no answer"), job_info()])

    def job(number: str) -> JobInfo:
        answer = next(answers)
        if isinstance(answer, ClusterError):
            raise answer
        return answer

    monkeypatch.setattr(slurm, "job", job)
    assert supervisor.job_status() is JobStatus.running
    monkeypatch.setattr(supervise, "CONTROLLER_S", -1.0)
    answers = iter([ClusterError("asked", "no answer")])
    assert supervisor.job_status() is JobStatus.unreachable


def test_memory_that_ran_out_refuses_the_next_plan_of_the_same_run(supervisor: Supervisor) -> None:
    cause = AttemptCause(CauseKind.out_of_memory, "OutOfMemoryError: CUDA out of memory", 3)
    supervisor.write_end("7_0_1", cause, Decision(Action.relaunch, "crash 1 of 2"))
    exhausted = find_out_of_memory(supervisor.run.path.parent)
    assert list(exhausted) == [supervisor.plan.point]
    with pytest.raises(PlanError, match=rf"memory ran out .* in run {supervisor.run.name} \(7_0_1\)"):
        make_plan(Config(), None, exhausted)


def test_another_end_refuses_nothing(supervisor: Supervisor) -> None:
    for kind, message in ((CauseKind.crash, "ValueError"), (CauseKind.out_of_memory, "MemoryError: host")):
        supervisor.write_end("7_0_1", AttemptCause(kind, message), Decision(Action.fail, "again"))
    assert find_out_of_memory(supervisor.run.path.parent) == {}
