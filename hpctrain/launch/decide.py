"""What to do when the ranks have ended: a pure function of the cause, the history and the budgets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hpctrain.config.schema import BudgetConfig
from hpctrain.run.causes import AttemptCause, CauseKind
from hpctrain.run.ledger import Attempt


class Action(StrEnum):
    """What the supervisor does next."""

    done = "done"
    relaunch = "relaunch"  # start the ranks again in this allocation
    requeue = "requeue"  # give the allocation back and wait for another
    leave = "leave"  # Slurm has taken the job already and decides itself
    stop = "stop"  # somebody asked for the end; `resume` goes on
    fail = "fail"


class JobStatus(StrEnum):
    """How the supervisor's own job stands when the ranks have ended."""

    none = "none"  # no Slurm around us
    interrupted = "interrupted"  # no Slurm around us, and somebody told us to end
    running = "running"
    preempted = "preempted"  # in its grace: still running, but not for long
    unreachable = "unreachable"  # the controller does not answer
    cancelled = "cancelled"
    timed_out = "timed_out"  # ended by Slurm at its time limit, which is no wish to end the run
    leaving = "leaving"  # neither running nor cancelled: requeued or preempted by Slurm


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str


_CRASHES = (CauseKind.crash, CauseKind.out_of_memory, CauseKind.killed, CauseKind.peer_lost)
_NODE = (CauseKind.node_failure, CauseKind.lost)


def _kinds_of(kind: CauseKind) -> tuple[CauseKind, ...]:
    """Causes that share a budget with this one."""
    return next((group for group in (_CRASHES, _NODE) if kind in group), (kind,))


def _count(attempts: list[Attempt], kinds: tuple[CauseKind, ...]) -> int:
    """Ends by these causes since the run last moved on. An attempt that moved on and then failed counts."""
    count = 0
    for attempt in reversed(attempts):
        count += attempt.end is not None and attempt.end["cause"] in kinds
        if attempt.progressed:
            break
    return count


def _without_progress(attempts: list[Attempt]) -> int:
    """Attempts in a row, up to now, that left the run where they found it."""
    count = 0
    for attempt in reversed(attempts):
        if attempt.progressed:
            break
        count += 1
    return count


def refuse_start(attempts: list[Attempt], budget: BudgetConfig) -> Decision | None:
    """Why the ranks must not be started again, whoever brought the job back (Slurm does not ask us)."""
    idle = _without_progress(attempts)
    if idle >= budget.no_progress:
        return Decision(Action.fail, f"no progress in {idle} attempts (budget.no_progress)")
    lost = _count(attempts, _NODE)
    if lost > budget.node_failure:
        return Decision(Action.fail, f"budget.node_failure={budget.node_failure} is used up")
    return None


def decide(cause: AttemptCause, attempts: list[Attempt], budget: BudgetConfig, status: JobStatus) -> Decision:
    """The next action. `attempts` is the history since a person sent the run, the one that just ended last.

    A scancel is never undone: with the job cancelled or the supervisor itself signalled, nothing is
    requeued.
    """
    kind = cause.kind
    if kind is CauseKind.done:
        return Decision(Action.done, "all steps are done")
    if kind is CauseKind.stop_file:
        return Decision(Action.stop, "STOP was found")
    if status is JobStatus.cancelled:
        return Decision(Action.stop, "the job was cancelled")
    if status is JobStatus.leaving:
        return Decision(Action.leave, "Slurm has taken the job back and decides whether it starts again")
    if status is JobStatus.interrupted or (
        status is JobStatus.none and kind in (CauseKind.preemption, CauseKind.time_limit)
    ):
        return Decision(Action.stop, "interrupted")
    if status is JobStatus.unreachable:
        return Decision(Action.fail, f"{kind}, and Slurm's controller does not answer")
    exhausted = refuse_start(attempts, budget)
    if exhausted is not None:
        return Decision(Action.fail, f"{exhausted.reason}; last cause: {cause.message or kind}")
    limits = {
        CauseKind.preemption: ("preemption", budget.preemption),
        CauseKind.time_limit: ("time_limit", budget.time_limit),
        CauseKind.hang: ("hang", budget.hang),
        CauseKind.node_failure: ("node_failure", budget.node_failure),
    }
    name, limit = limits.get(kind, ("crash", budget.crash))
    used = _count(attempts, _kinds_of(kind))
    if used > limit:
        return Decision(Action.fail, f"budget.{name}={limit} is used up; last cause: {cause.message or kind}")
    gives_back = kind in (CauseKind.preemption, CauseKind.time_limit, CauseKind.node_failure)
    if gives_back or status in (JobStatus.timed_out, JobStatus.preempted):
        action = Action.relaunch if status is JobStatus.none else Action.requeue
        return Decision(action, f"{kind}: start again ({used} of {limit})")
    return Decision(Action.relaunch, f"{kind}: start the ranks again ({used} of {limit})")
