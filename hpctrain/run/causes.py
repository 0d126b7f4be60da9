"""Why ranks ended. Each rank leaves a file; srun's exit code is only a hint (143 was seen for a rank that
exited with 9). A rank without a file was killed."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from hpctrain.run.directory import write_json


class CauseKind(StrEnum):
    """What ended a rank, or an attempt."""

    done = "done"  # all steps are finished
    stop_file = "stop_file"  # somebody touched STOP
    preemption = "preemption"  # SIGTERM: preempted, requeued by an administrator, or scancelled
    time_limit = "time_limit"  # the --signal signal
    crash = "crash"  # an exception
    out_of_memory = "out_of_memory"
    hang = "hang"  # no step for too long
    peer_lost = "peer_lost"  # another rank went away
    killed = "killed"  # no cause file: SIGKILL, or worse
    node_failure = "node_failure"
    lost = "lost"  # the start left no end in the ledger: head node lost, or grace 0


STOPPED_BY_AGREEMENT = (CauseKind.stop_file, CauseKind.preemption, CauseKind.time_limit)


@dataclass(frozen=True)
class RankCause:
    """One rank's own account of its end. `step` counts finished steps, `saved_step` committed ones."""

    rank: int
    kind: CauseKind
    message: str = ""
    step: int | None = None
    saved_step: int | None = None
    host: str = ""
    time: float = 0.0
    traceback: str = ""


def cause_path(folder: Path, attempt: str, rank: int) -> Path:
    return folder / f"{attempt}_{rank}.json"


def leave_cause(
    folder: Path,
    attempt: str,
    rank: int,
    kind: CauseKind,
    *,
    message: str = "",
    step: int | None = None,
    saved_step: int | None = None,
    error: BaseException | None = None,
) -> None:
    """Write this rank's cause file, unless it has left one already: the first cause counts."""
    path = cause_path(folder, attempt, rank)
    if path.exists():
        return
    trace = "".join(traceback.format_exception(error)) if error else ""
    cause = RankCause(rank, kind, message, step, saved_step, socket.gethostname(), time.time(), trace)
    write_json(path, asdict(cause))


def read_causes(folder: Path, attempt: str, num_ranks: int) -> dict[int, RankCause]:
    """The cause files that the ranks of an attempt left, by rank."""
    # A directory listing refreshes what NFS has cached about it.
    os.listdir(folder)
    causes = {}
    for rank in range(num_ranks):
        path = cause_path(folder, attempt, rank)
        if path.exists():
            fields = json.loads(path.read_text())
            causes[rank] = RankCause(**{**fields, "kind": CauseKind(fields["kind"])})
    return causes


@dataclass(frozen=True)
class AttemptCause:
    """Why an attempt ended: the root cause among all ranks."""

    kind: CauseKind
    message: str
    rank: int | None = None


# What explains the rest comes first: a crash explains lost peers, a lost peer explains nothing.
_ORDER = (CauseKind.out_of_memory, CauseKind.crash, CauseKind.hang)


def classify(causes: dict[int, RankCause], num_ranks: int) -> AttemptCause:
    """The root cause of an attempt from the files of its ranks."""
    for kind in _ORDER:
        found = sorted((c for c in causes.values() if c.kind is kind), key=lambda c: c.time)
        if found:
            return AttemptCause(kind, found[0].message, found[0].rank)
    missing = [rank for rank in range(num_ranks) if rank not in causes]
    if missing:
        ranks = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        return AttemptCause(CauseKind.killed, f"rank {ranks} ended without a word (killed)", missing[0])
    lost = [c for c in causes.values() if c.kind is CauseKind.peer_lost]
    if lost:
        return AttemptCause(CauseKind.peer_lost, lost[0].message, lost[0].rank)
    kinds = {c.kind for c in causes.values()}
    for kind in (*STOPPED_BY_AGREEMENT, CauseKind.done):
        if kind in kinds:
            cause = next(c for c in causes.values() if c.kind is kind)
            return AttemptCause(kind, cause.message, None)
    raise AssertionError(f"no rule for {kinds}")
