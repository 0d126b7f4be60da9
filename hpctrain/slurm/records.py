"""What Slurm's programs print, as typed records. Pure functions of text.

Text is parsed rather than JSON: scontrol prints none before 23.02, and its schema changes between versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from hpctrain.errors import ClusterError

# Base states after which a job does not come back by itself (squeue(1), JOB STATE CODES).
TERMINAL_STATES = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
        "TIMEOUT",
    }
)
# Lines of scontrol that hold one free text, which may contain spaces and "=".
_FREE_TEXT = re.compile(r"^\s*(Command|WorkDir|Comment|Reason|OS|Std(?:Err|In|Out)|SubmitLine|Extra)=(.*)$")


@dataclass(frozen=True)
class JobInfo:
    """What the controller knows of a job. Times are seconds since the epoch."""

    job_id: str  #: as one names it: `<job>`, `<array job>_<task>`; tasks not yet split off: `<job>_[2-3]`
    raw_id: str  #: the number that SLURM_JOB_ID holds
    name: str
    state: str  #: PENDING, RUNNING, …; COMPLETING hides the state beneath it
    reason: str  #: why it waits or failed
    exit_code: int
    signal: int  #: that ended the batch script, or 0
    restarts: int  #: times it was requeued, for whatever cause
    can_requeue: bool
    partition: str
    nodes: str  #: as Slurm writes them (`node[0-3]`); empty before the start
    batch_host: str
    time_limit_s: int | None  #: None for no limit
    start_time_s: float | None  #: of this start; of a pending job the expected one, if Slurm has one
    end_time_s: float | None  #: by then it has to be over: a preemption brings it forward
    preempt_time_s: float | None  #: when the grace of a preemption began
    work_dir: str

    def was_ended(self, restarts: int) -> bool:
        """Whether the start numbered `restarts` (SLURM_RESTART_COUNT) has been ended for good.

        True for one that was cancelled, ran out of time or failed: requeueing it then would undo a
        scancel. A job that Slurm is bringing back has already counted its restart.
        """
        return self.restarts == restarts and (self.state == "COMPLETING" or self.state in TERMINAL_STATES)

    def was_out_of_time(self) -> bool:
        """Whether the job was ended at its time limit: COMPLETING does not say what it was ended for."""
        if self.start_time_s is None or self.time_limit_s is None or self.end_time_s is None:
            return False
        return self.end_time_s >= self.start_time_s + self.time_limit_s


@dataclass(frozen=True)
class QueueEntry:
    """A job in the queue; of an array, one per task."""

    job_id: str
    state: str
    partition: str
    nodes: str
    reason: str
    start_time_s: float | None  #: of a pending job the expected one, if Slurm has one
    user: str
    name: str


@dataclass(frozen=True)
class AccountingRecord:
    """One start of a job, from the accounting database."""

    job_id: str
    state: str
    exit_code: int
    signal: int
    nodes: str
    start_time_s: float | None
    end_time_s: float | None
    elapsed_s: int


@dataclass(frozen=True)
class NodeInfo:
    """A node as the controller sees it."""

    name: str
    state: str  #: with its flags (`IDLE+DRAIN`); `*` at its end: does not answer
    address: str  #: NodeAddr: reaches the node where its name does not resolve
    hostname: str
    gres: str  #: `gpu:rtx4090:8(S:0-1)`; empty for none
    num_cpus: int
    memory_mib: int
    reason: str  #: why it is down or drained
    features: tuple[str, ...] = ()  #: what `--constraint` may ask for
    partitions: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartitionInfo:
    """A partition and its rules."""

    name: str
    is_default: bool
    state: str
    nodes: str
    num_nodes: int
    max_time_s: int | None  #: None for no limit
    default_time_s: int | None
    grace_time_s: int  #: between the warning and the end of a preempted job
    preempt_mode: str  #: what happens to its jobs: OFF, CANCEL, REQUEUE, SUSPEND


def parse_version(text: str) -> tuple[int, int]:
    """`slurm-wlm 22.05.8` to (22, 5)."""
    found = re.search(r"(\d+)\.(\d+)", text)
    if not found:
        raise ClusterError("asked Slurm for its version", repr(text))
    return int(found[1]), int(found[2])


def parse_jobs(text: str) -> list[JobInfo]:
    """What `scontrol show job` prints."""
    return [_job(record) for record in parse_records(text) if "JobId" in record]


def _job(record: dict[str, str]) -> JobInfo:
    exit_code, _, signal = record["ExitCode"].partition(":")
    array, task = record.get("ArrayJobId"), record.get("ArrayTaskId", "")
    if array and task:
        job_id = f"{array}_{task}" if task.isdigit() else f"{array}_[{task}]"
    else:
        job_id = record["JobId"]
    return JobInfo(
        job_id=job_id,
        raw_id=record["JobId"],
        name=record["JobName"],
        state=record["JobState"],
        reason=_text(record, "Reason"),
        exit_code=int(exit_code),
        signal=int(signal or 0),
        restarts=int(record.get("Restarts", 0)),
        can_requeue=record.get("Requeue") == "1",
        partition=record["Partition"],
        nodes=_text(record, "NodeList"),
        batch_host=_text(record, "BatchHost"),
        time_limit_s=parse_duration_s(record["TimeLimit"]),
        start_time_s=parse_time_s(record.get("StartTime", "")),
        end_time_s=parse_time_s(record.get("EndTime", "")),
        preempt_time_s=parse_time_s(record.get("PreemptTime", "")),
        work_dir=_text(record, "WorkDir"),
    )


def parse_queue(text: str) -> list[QueueEntry]:
    """What `queue` has squeue print; a name may hold a `|`."""
    rows = [line.split("|", 7) for line in text.splitlines() if line.strip()]
    return [
        QueueEntry(i, s, p, n, r, parse_time_s(start), user, name)
        for i, s, p, n, r, start, user, name in rows
    ]


def parse_accounting(text: str) -> list[AccountingRecord]:
    """What `accounting` has sacct print. `CANCELLED by 1000` becomes CANCELLED."""
    records = []
    for line in text.splitlines():
        job_id, state, status, nodelist, start, end, elapsed = line.split("|")
        exit_code, _, signal = status.partition(":")
        records.append(
            AccountingRecord(
                job_id=job_id,
                state=state.split()[0],
                exit_code=int(exit_code),
                signal=int(signal or 0),
                nodes="" if nodelist == "None assigned" else nodelist,
                start_time_s=parse_time_s(start),
                end_time_s=parse_time_s(end),
                elapsed_s=int(elapsed),
            )
        )
    return records


def parse_nodes(text: str) -> list[NodeInfo]:
    """What `scontrol show node` prints."""
    return [
        NodeInfo(
            name=record["NodeName"],
            state=record["State"],
            address=_text(record, "NodeAddr"),
            hostname=_text(record, "NodeHostName"),
            gres=_text(record, "Gres"),
            num_cpus=int(record["CPUTot"]),
            memory_mib=int(record["RealMemory"]),
            reason=_text(record, "Reason"),
            features=_names(record, "ActiveFeatures"),
            partitions=_names(record, "Partitions"),
        )
        for record in parse_records(text)
        if "NodeName" in record
    ]


def parse_partitions(text: str) -> list[PartitionInfo]:
    """What `scontrol show partition` prints."""
    return [
        PartitionInfo(
            name=record["PartitionName"],
            is_default=record["Default"] == "YES",
            state=record["State"],
            nodes=_text(record, "Nodes"),
            num_nodes=int(record["TotalNodes"]),
            max_time_s=parse_duration_s(record["MaxTime"]),
            default_time_s=parse_duration_s(record["DefaultTime"]),
            grace_time_s=int(record["GraceTime"]),
            preempt_mode=record["PreemptMode"],
        )
        for record in parse_records(text)
        if "PartitionName" in record
    ]


def parse_duration_s(text: str) -> int | None:
    """`1-02:03:04`, `02:03:04`, `03:04` (minutes and seconds) to seconds; UNLIMITED, NONE, … to None."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not found:
        return None
    days, hours, minutes, seconds = (int(group or 0) for group in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def parse_tables(text: str) -> list[dict[str, str]]:
    """Rows of a table that `--parsable2` printed with its header; names and values without indentation."""
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.strip()]
    return [dict(zip(lines[0], line, strict=False)) for line in lines[1:]]


def parse_records(text: str) -> Iterator[dict[str, str]]:
    """Records of `scontrol show`, separated by blank lines; the first of two equal keys counts."""
    for block in re.split(r"\n\s*\n", text):
        record: dict[str, str] = {}
        for line in block.splitlines():
            for key, value in _pairs(line):
                record.setdefault(key, value)
        if record:
            yield record


def _pairs(line: str) -> list[tuple[str, str]]:
    if free := _FREE_TEXT.match(line):
        return [(free[1], free[2].strip())]
    head, is_job, name = line.partition(" JobName=")
    pairs = [word.partition("=")[::2] for word in head.split() if "=" in word]
    return [*pairs, ("JobName", name)] if is_job else pairs


def _text(record: dict[str, str], key: str) -> str:
    value = record.get(key, "")
    return "" if value in ("(null)", "None", "N/A") else value


def _names(record: dict[str, str], key: str) -> tuple[str, ...]:
    return tuple(name for name in _text(record, key).split(",") if name)


def parse_time_s(text: str) -> float | None:
    """Local time as Slurm prints it, to seconds since the epoch; Unknown, None, N/A to None."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
