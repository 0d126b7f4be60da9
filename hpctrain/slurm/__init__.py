"""Typed calls of squeue, scontrol, sacct, scancel and sinfo, from Slurm 22.05 on.

A controller that is busy is asked again for a while; a program that is missing is a `ClusterError`.
Job ids are strings, `<job>` or `<array job>_<task>`: requeueing a task by its array's id requeues them all.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence

from hpctrain.errors import ClusterError
from hpctrain.slurm.records import (
    TERMINAL_STATES,
    AccountingRecord,
    JobInfo,
    NodeInfo,
    PartitionInfo,
    QueueEntry,
    parse_accounting,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_queue,
    parse_version,
)

__all__ = [
    "TERMINAL_STATES",
    "AccountingRecord",
    "JobInfo",
    "NodeInfo",
    "PartitionInfo",
    "QueueEntry",
    "accounting",
    "cancel",
    "expand",
    "is_alive",
    "job",
    "nodes",
    "partitions",
    "queue",
    "requeue",
    "run",
    "update",
    "version",
]

_BUSY = ("Unable to contact slurm", "Socket timed out", "Slurm temporarily unable", "standby mode")
_UNKNOWN_JOB = "Invalid job id specified"
_LOCAL = "on a login node of a cluster, with SLURM_CONF as it is there; cluster=local runs here without Slurm"
# Variables of the user that change what the programs print.
_FORMATS = ("SQUEUE_", "SACCT_", "SINFO_", "SCONTROL_", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN")


def run(
    argv: Sequence[str], timeout_s: float = 60, patience_s: float = 30, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs a Slurm program; while the controller is busy asks again, for `patience_s` or one attempt more.

    A request that timed out may have been carried out: give it only what may happen twice.

    Raises:
        ClusterError: the program is missing or hangs, or (with `check`) it exited with an error.
    """
    asked, give_up_s, delay_s = f"asked Slurm: {' '.join(argv)}", time.monotonic() + patience_s, 1.0
    while True:
        done = _run_once(argv, timeout_s, asked)
        is_busy = done.returncode != 0 and any(text in done.stderr for text in _BUSY)
        if not is_busy or time.monotonic() + delay_s > give_up_s:
            break
        time.sleep(delay_s)
        delay_s *= 2
    if check and done.returncode:
        raise ClusterError(asked, _said(done), _LOCAL if "onfiguration" in done.stderr else "")
    return done


def _run_once(argv: Sequence[str], timeout_s: float, asked: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FORMATS)}
    try:
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s)
    except FileNotFoundError:
        raise ClusterError(asked, f"{argv[0]} is not on PATH", _LOCAL) from None
    except subprocess.TimeoutExpired:
        raise ClusterError(asked, f"no answer within {timeout_s:g} s", "scontrol ping") from None


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"


def version() -> tuple[int, int]:
    """Slurm's version, such as (22, 5)."""
    return parse_version(run(["sinfo", "--version"]).stdout)


def job(job_id: str) -> JobInfo | None:
    """The job, or None where the controller does not know it (any more: it forgets after MinJobAge).

    Given the id of a whole array, the first element that the controller lists.
    """
    found = _elements(job_id)
    return next((each for each in found if job_id in (each.job_id, each.raw_id)), found[0] if found else None)


def is_alive(job_id: str) -> bool:
    """Whether the job, or an element of the array, waits, runs or is ending."""
    return any(each.state not in TERMINAL_STATES for each in _elements(job_id))


def queue(job_ids: Sequence[str] = (), user: str | None = None) -> list[QueueEntry]:
    """The queue: these jobs, this user's, or all. Jobs that ended or are not known are left out."""
    who = ["--jobs", ",".join(job_ids)] if job_ids else ["--user", user] if user else []
    done = run(["squeue", "--noheader", "--array", "--format", "%i|%T|%P|%N|%r|%S|%u|%j", *who], check=False)
    if done.returncode and _UNKNOWN_JOB not in done.stderr:
        raise ClusterError("asked Slurm for the queue", _said(done))
    return parse_queue(done.stdout)


def accounting(job_id: str) -> list[AccountingRecord] | None:
    """Every start of the job, oldest first, or None where the cluster keeps no accounts (or cannot say)."""
    fields = "JobID,State,ExitCode,NodeList,Start,End,ElapsedRaw"
    options = ["--duplicates", "--allocations", "--parsable2", "--noheader", f"--format={fields}"]
    done = run(["sacct", *options, "--jobs", job_id], check=False)
    return None if done.returncode else parse_accounting(done.stdout)


def requeue(job_id: str) -> None:
    """Sends a job back into the queue; one that runs is ended for it (SIGTERM, KillWait, SIGKILL).

    Asks once: a request repeated blindly could bring back a job that was cancelled meanwhile.
    """
    done = run(["scontrol", "requeue", job_id], patience_s=0, check=False)
    if done.returncode and "Job is pending execution" not in done.stderr:
        raise ClusterError(f"asked Slurm to requeue job {job_id}", _said(done))


def cancel(job_id: str) -> None:
    """Cancels a job or a whole array; one that has ended already is no error."""
    done = run(["scancel", job_id], check=False)
    if done.returncode and _UNKNOWN_JOB not in done.stderr:
        raise ClusterError(f"asked Slurm to cancel job {job_id}", _said(done))


def update(job_id: str, **fields: str) -> None:
    """Changes a job: `update("12", TimeLimit="60", ExcNodeList="node3")` (scontrol(1), update)."""
    run(["scontrol", "update", f"JobId={job_id}", *(f"{name}={value}" for name, value in fields.items())])


def nodes(nodelist: str = "") -> list[NodeInfo]:
    """These nodes (`node[0-3]`), or all."""
    return parse_nodes(run(["scontrol", "show", "node", *([nodelist] if nodelist else [])]).stdout)


def partitions() -> list[PartitionInfo]:
    """The partitions that the user may see."""
    return parse_partitions(run(["scontrol", "show", "partition"]).stdout)


def expand(nodelist: str) -> list[str]:
    """`node[0-2],login` to single names, in order."""
    return run(["scontrol", "show", "hostnames", nodelist]).stdout.split() if nodelist else []


def _elements(job_id: str) -> list[JobInfo]:
    done = run(["scontrol", "show", "job", job_id], check=False)
    if done.returncode and _UNKNOWN_JOB not in done.stderr:
        raise ClusterError(f"asked Slurm for job {job_id}", _said(done))
    return parse_jobs(done.stdout)
