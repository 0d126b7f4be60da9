"""The verb `selftest`: sends the job, waits for it, shows its table."""

from __future__ import annotations

import json
import sys

from hpctrain import slurm
from hpctrain.config.schema import ClusterKind, Config
from hpctrain.errors import RunError
from hpctrain.launch.script import wait_for_job
from hpctrain.launch.submit import checked_plan, run_directory, submit
from hpctrain.run.causes import CauseKind
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.selftest import table

LOOK_S = 10.0  # between two looks at a job that is waited for


def selftest(config: Config, *, as_json: bool) -> int:
    """Send the run, or take the one of that name which is there; show its table when it is over.

    Returns 0 if every check passed, else 1. Raises HpctrainError when the job cannot be sent.
    """
    run = run_directory(config)
    job = run.sent_job()
    if not run.done.exists() and not (job and slurm.is_alive(job)):
        job = send(config)
    if job is not None:
        wait_for_job(job, LOOK_S, lambda: progress(run))
    ledger = Ledger(run.ledger)
    if as_json:
        print(json.dumps({"run": str(run.path), "job": job, **table.facts(ledger)}))
    else:
        print(f"{table.text(ledger)}\n  logs and traces of it are in {run.path}")
    return 0 if table.is_passed(table.read_rows(ledger)) else 1


def send(config: Config) -> str | None:
    """Submit the run and return its job; without Slurm carry it out here, over its preemption."""
    plan = checked_plan(config)
    print("\n".join(plan.lines()), file=sys.stderr, flush=True)
    try:
        sent = submit(config, plan)
        if config.cluster.kind is ClusterKind.local and was_preempted(sent.run):
            sent = submit(config, plan)
    except RunError as error:  # the table says what failed
        print(f"hpctrain: {error}", file=sys.stderr)
        return None
    if sent.job is not None:
        again = f"hpctrain selftest name={sent.run.name}"
        print(f"{sent.text()}\n  Ctrl-C does not end it; {again} waits again", file=sys.stderr, flush=True)
    return sent.job


def was_preempted(run: RunDirectory) -> bool:
    """Whether the run has just ended by the signal that it sends itself. Without Slurm nobody requeues it."""
    ledger = Ledger(run.ledger)
    last = ledger.attempts()[-1]
    begun = ledger.last("begun")
    is_own = begun is not None and begun["check"] == table.PREEMPTED and begun["attempt"] == last.name
    return is_own and last.end is not None and last.end["cause"] == CauseKind.preemption


def progress(run: RunDirectory) -> str:
    rows = table.read_rows(Ledger(run.ledger))
    return f", {sum(row.error is not None for row in rows)} of {len(rows)} checks done"
