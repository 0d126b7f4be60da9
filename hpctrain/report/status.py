"""Facts of a run from its directory, and from Slurm where it can be asked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpctrain import slurm
from hpctrain.errors import ClusterError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.drift import drift_lines
from hpctrain.run.ledger import Attempt, Ledger

LIVE_STATES = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")


@dataclass(frozen=True)
class Status:
    """One run. `state` is COMPLETED, FAILED, STOPPED, CANCELLED, NEW or INTERRUPTED; while the job lives,
    Slurm's own word."""

    run: str
    path: str
    state: str
    job: str | None
    step: int
    num_steps: int | None
    saved_step: int | None
    samples_per_s: float | None
    last: dict[str, Any]
    evaluation: dict[str, Any]
    cause: str
    reason: str
    compared: dict[str, Any]  #: with the plan, after warm-up
    attempts: list[dict[str, Any]] = field(default_factory=list)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl that are whole."""
    records = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return records


def make_status(run: RunDirectory) -> Status:
    ledger = Ledger(run.ledger)
    attempts = ledger.attempts()
    job = run.sent_job()
    records = read_metrics(run.metrics)
    training = [r for r in records if r.get("kind") == "train"]
    evaluations = [r for r in records if r.get("kind") == "eval"]
    last = training[-1] if training else {}
    end = attempts[-1].end if attempts else None
    saved = max((a.saved_step for a in attempts if a.saved_step is not None), default=None)
    steps = [s for s in (last.get("step"), saved, (end or {}).get("last_step")) if s is not None]
    return Status(
        run=run.name,
        path=str(run.path),
        state=_state(run, job, attempts),
        job=job,
        step=max(steps, default=0),
        num_steps=last.get("num_steps"),
        saved_step=saved,
        samples_per_s=last.get("samples_per_s"),
        last=last,
        evaluation=evaluations[-1] if evaluations else {},
        cause=str((end or {}).get("message") or (end or {}).get("cause") or ""),
        reason=str((end or {}).get("reason") or ""),
        compared=ledger.last("compared") or {},
        attempts=[_attempt_facts(a) for a in attempts],
    )


def _attempt_facts(attempt: Attempt) -> dict[str, Any]:
    end = attempt.end or {}
    return {
        "attempt": attempt.name,
        "nodes": attempt.start.get("nodes"),
        "started": attempt.start["time"],
        "ended": end.get("time"),
        "restored_step": attempt.restored_step,
        "saved_step": attempt.saved_step,
        "last_step": end.get("last_step"),
        "cause": end.get("cause"),
        "decision": end.get("decision"),
    }


def _state(run: RunDirectory, job: str | None, attempts: list[Attempt]) -> str:
    if run.done.exists():
        return "COMPLETED"
    live = _slurm_state(job) if job else None
    if live in LIVE_STATES:
        return str(live)
    if run.is_locked():
        return "RUNNING"
    if live == "CANCELLED":
        return "CANCELLED"
    if not attempts:
        return live or "NEW"
    end = attempts[-1].end
    if end is None:
        return "INTERRUPTED"
    ended = {"fail": "FAILED", "stop": "CANCELLED" if "cancelled" in str(end.get("reason")) else "STOPPED"}
    return ended.get(end["decision"], live or "INTERRUPTED")


def _slurm_state(job: str) -> str | None:
    """Slurm's word on a job, None where there is no Slurm or it has forgotten."""
    try:
        info = slurm.job(job)
    except ClusterError:
        return None
    return info.state if info else None


def to_json(status: Status) -> str:
    return json.dumps(asdict(status), indent=1)


def text(status: Status) -> str:
    """A run for a terminal, a few lines."""
    total = f" of {status.num_steps}" if status.num_steps else ""
    lines = [f"{status.run}  {status.state}" + (f"  job {status.job}" if status.job else "")]
    lines.append(f"  folder    {status.path}")
    rate = f", {status.samples_per_s:.1f} samples/s" if status.samples_per_s else ""
    saved = f", saved at {status.saved_step}" if status.saved_step is not None else ""
    lines.append(f"  steps     {status.step}{total}{saved}{rate}")
    if status.compared:
        lines += [f"  plan      {told}" for told in drift_lines(status.compared)]
    if "loss" in status.last:
        lines.append(f"  loss      {float(status.last['loss']):.4f} at step {status.last['step']}")
    shown = {k: v for k, v in status.evaluation.items() if isinstance(v, float) and k != "time"}
    if shown:
        facts = "  ".join(f"{key} {value:.4f}" for key, value in shown.items())
        lines.append(f"  eval      {facts} (step {status.evaluation['step']})")
    for attempt in status.attempts[-8:]:
        last = "…" if attempt["last_step"] is None else attempt["last_step"]
        span = f"steps {attempt['restored_step'] or 0}–{last}"
        saved = f"saved {attempt['saved_step']}" if attempt["saved_step"] is not None else "nothing saved"
        ended = f"{attempt['cause']} → {attempt['decision']}" if attempt["cause"] else "going on"
        lines.append(f"  attempt   {attempt['attempt']}: {span}, {saved}; {ended}")
    if status.state in ("FAILED", "STOPPED", "CANCELLED", "INTERRUPTED") and status.cause:
        told = status.reason if status.cause in status.reason else f"{status.cause} ({status.reason})"
        lines.append(f"  why       {told}")
    return "\n".join(lines)


def line(status: Status) -> str:
    """A run in one line, for a sweep."""
    total = f"/{status.num_steps}" if status.num_steps else ""
    loss = f"  loss {float(status.last['loss']):.4f}" if "loss" in status.last else ""
    why = f"  {status.cause}" if status.state == "FAILED" else ""
    return f"{status.state:<12} {status.step}{total:<8} {status.run}{loss}{why}"
