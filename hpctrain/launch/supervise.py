"""The supervisor: one process on the batch host, without torch. It starts the ranks, reads why they ended,
and decides: done, relaunch, requeue, stop."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

from hpctrain import slurm
from hpctrain.config.load import load_config
from hpctrain.config.schema import ClusterKind, Config
from hpctrain.errors import ClusterError, HpctrainError, RunError
from hpctrain.launch.decide import Action, Decision, JobStatus, decide, refuse_start
from hpctrain.launch.environment import Allocation, allocation
from hpctrain.launch.ranks import LocalRanks, SlurmRanks
from hpctrain.plan.plan import RunPlan
from hpctrain.run.causes import AttemptCause, CauseKind, RankCause, classify, read_causes
from hpctrain.run.directory import RunDirectory, make_attempt
from hpctrain.run.exhausted import note_out_of_memory
from hpctrain.run.ledger import Attempt, Ledger

LEASE_S = 120.0  # how long a lock of a lost node may live on NFS
CONTROLLER_S = 600.0  # how long Slurm's controller may be away
LAST_WORD_S = 300.0  # how long ranks may take to end after the first has
LOOK_S = 5.0  # between looks at the cause files of a run that goes on: they lie on NFS
NFS_S = 5.0  # how long a file written on another node may stay unseen

T = TypeVar("T")


class Supervisor:
    """One start of a run: as many attempts as its budgets allow."""

    def __init__(self, run: RunDirectory, config: Config, plan: RunPlan, where: Allocation) -> None:
        self.run, self.config, self.plan, self.where = run, config, plan, where
        self.ledger = Ledger(run.ledger)
        self.signalled: int | None = None

    def supervise(self) -> Decision:
        """Run to an end. The caller holds the run's lock."""
        self.close_open_attempts()
        no_start = self.reason_not_to_start()
        if no_start is not None:
            print(f"hpctrain: {no_start.action}: {no_start.reason}", flush=True)
            return no_start
        while True:
            attempt = self.new_attempt()
            cause = self.run_attempt(attempt)
            status = self.job_status()
            if status is JobStatus.timed_out and cause.kind is CauseKind.preemption:
                cause = AttemptCause(CauseKind.time_limit, "SIGTERM at the time limit")
            decision = decide(cause, self.attempts_with(attempt, cause), self.config.budget, status)
            self.write_end(attempt, cause, decision)
            if decision.action is Action.requeue:
                requeued = self.requeue(decision)
                if requeued is not decision:
                    self.write_end(attempt, cause, requeued)
                return requeued
            if decision.action is not Action.relaunch:
                return decision

    def reason_not_to_start(self) -> Decision | None:
        if self.run.done.exists():
            return Decision(Action.done, "DONE was found: nothing to do")
        if self.run.stop.exists():
            return Decision(Action.stop, "STOP was found: remove it, or `hpctrain resume`")
        return refuse_start(self.ledger.since_frozen(), self.config.budget)

    def write_end(self, attempt: str, cause: AttemptCause, decision: Decision) -> None:
        """Of several ends of an attempt the last one counts."""
        self.ledger.append(
            "end",
            attempt=attempt,
            cause=cause.kind,
            message=cause.message,
            rank=cause.rank,
            last_step=self.last_step(attempt),
            decision=decision.action,
            reason=decision.reason,
        )
        # A host that is full (MemoryError) says nothing about the layout on the device.
        if self.plan.point and "OutOfMemoryError" in cause.message:
            note_out_of_memory(
                self.run.path.parent,
                self.plan.point,
                run=self.run.name,
                attempt=attempt,
                message=cause.message,
            )
        said = f"{cause.kind}: {cause.message}" if cause.message else cause.kind
        print(f"hpctrain: attempt {attempt}: {said} → {decision.action} ({decision.reason})", flush=True)

    def requeue(self, decision: Decision) -> Decision:
        """Give the job back to the queue, looking before each try whether it was cancelled meanwhile."""
        assert self.where.job is not None
        deadline = time.monotonic() + CONTROLLER_S
        while True:
            status = self.job_status()
            if status is JobStatus.cancelled:
                return Decision(Action.stop, "the job was cancelled")
            if status is JobStatus.leaving:
                return Decision(Action.leave, "Slurm has taken the job back already")
            try:
                slurm.requeue(self.where.job)
                return decision  # from here on Slurm ends this job
            except ClusterError as error:
                if time.monotonic() > deadline or status is JobStatus.unreachable:
                    return Decision(Action.fail, f"the job could not be requeued: {error.found}")
            time.sleep(2.0)

    def run_attempt(self, attempt: str) -> AttemptCause:
        """Start the ranks, wait for their end, and say why they ended."""
        ranks = SlurmRanks if self.where.is_slurm else LocalRanks
        launched = ranks(self.run, self.config, self.plan, attempt, self.ask)
        self.ledger.append(
            "start",
            attempt=attempt,
            job=self.where.job,
            restart=self.where.restart,
            nodes=launched.nodes,
            num_ranks=self.plan.world_size,
            code=launched.code.name,
        )
        launched.start()
        self.wait_for_ranks(launched, attempt)
        cause = classify(self.final_causes(attempt), self.plan.world_size)
        if cause.kind in (CauseKind.killed, CauseKind.peer_lost):
            lost = launched.lost_nodes()
            if lost:
                return AttemptCause(CauseKind.node_failure, f"node {', '.join(lost)} was lost", cause.rank)
        return cause

    def wait_for_ranks(self, launched: SlurmRanks | LocalRanks, attempt: str) -> None:
        """Return when the ranks have ended, and in bounded time once the first has said why it did."""
        first_word: float | None = None
        next_look = 0.0
        while launched.poll() is None:
            now = time.monotonic()
            if self.signalled is not None:
                launched.signal(signal.SIGTERM)
            if self.signalled is not None or now >= next_look:
                next_look = now + LOOK_S
                said = len(self.causes(attempt))
                if said and first_word is None:
                    first_word = now
                if self.signalled is not None and said == self.plan.world_size:
                    return  # srun may take longer to end than we have to live
            if first_word is not None and now - first_word > LAST_WORD_S:
                launched.kill()  # a rank that cannot die (a hung file system) must not hold the run
                return
            time.sleep(0.2)

    def final_causes(self, attempt: str) -> dict[int, RankCause]:
        """The causes, once NFS has had time to show those of other nodes."""
        deadline = time.monotonic() + (NFS_S if self.where.is_slurm else 0.0)
        while True:
            causes = self.causes(attempt)
            if len(causes) == self.plan.world_size or time.monotonic() > deadline:
                return causes
            time.sleep(0.5)

    def ask(self, question: Callable[[], T]) -> T:
        """Ask Slurm, for minutes if the controller is away. Raises ClusterError after that."""
        deadline = time.monotonic() + CONTROLLER_S
        while True:
            try:
                return question()
            except ClusterError:
                if time.monotonic() > deadline or self.signalled is not None:
                    raise
                time.sleep(5.0)

    def job_status(self) -> JobStatus:
        """How our own job stands now. Our own signal says less than Slurm, but it says no."""
        number = self.where.job
        if number is None:
            return JobStatus.none if self.signalled is None else JobStatus.interrupted
        try:
            job = self.ask(lambda: slurm.job(number))
        except ClusterError:
            return JobStatus.unreachable if self.signalled is None else JobStatus.cancelled
        if job is None:
            return JobStatus.cancelled
        if job.was_ended(self.where.restart):
            return JobStatus.timed_out if job.was_out_of_time() else JobStatus.cancelled
        if job.state != "RUNNING":
            return JobStatus.leaving
        if self.signalled is not None:
            return JobStatus.cancelled
        return JobStatus.running if job.preempt_time_s is None else JobStatus.preempted

    def new_attempt(self) -> str:
        """A name that no attempt of this run has had, though job numbers can come again."""
        used = {attempt.name for attempt in self.ledger.attempts()}
        job = self.where.job or "local"
        number = 1
        while make_attempt(job, self.where.restart, number) in used:
            number += 1
        return make_attempt(job, self.where.restart, number)

    def attempts_with(self, attempt: str, cause: AttemptCause) -> list[Attempt]:
        """The history since a person sent the run, this attempt with the end about to be written."""
        attempts = self.ledger.since_frozen()
        return [replace(a, end={"cause": cause.kind}) if a.name == attempt else a for a in attempts]

    def last_step(self, attempt: str) -> int | None:
        return max((c.step for c in self.causes(attempt).values() if c.step is not None), default=None)

    def causes(self, attempt: str) -> dict[int, RankCause]:
        return read_causes(self.run.causes, attempt, self.plan.world_size)

    def close_open_attempts(self) -> None:
        """Write the end that an earlier start could not write: its node was lost, or it had no grace."""
        for attempt in self.ledger.attempts():
            if attempt.end is None:
                self.ledger.append(
                    "end",
                    attempt=attempt.name,
                    cause=CauseKind.lost,
                    message="the start was cut off before it could say why",
                    rank=None,
                    last_step=self.last_step(attempt.name),
                    decision=Action.leave,
                    reason="closed by the next start",
                )

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signalled = number


def supervise(run_path: str) -> int:
    """Supervise the run in this folder; 0 when it is done or was asked to stop. Raises RunError if it failed.

    This is what submitit sends, what train.sbatch runs and what `cluster=local` calls.
    """
    run = RunDirectory(Path(run_path))
    config = load_config(run.config)
    plan = RunPlan.from_json(run.plan.read_text())
    where = allocation() if config.cluster.kind is ClusterKind.slurm else Allocation(None, 0, None)
    supervisor = Supervisor(run, config, plan, where)
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
    previous = {number: signal.signal(number, supervisor.on_signal) for number in handled}
    try:
        with run.lock(wait_s=LEASE_S if where.restart else 0.0):
            decision = supervisor.supervise()
            if decision.action is Action.done:
                run.done.touch()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if decision.action is Action.fail:
        raise RunError(
            f"run {run.name} failed",
            decision.reason,
            f"hpctrain logs {run.name}; then hpctrain resume {run.name}",
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(supervise(sys.argv[1]))
    except HpctrainError as error:
        print(f"hpctrain: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
