"""The verbs that take a run: status, logs, cancel."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from hpctrain import slurm
from hpctrain.errors import ConfigError, RunError
from hpctrain.report.status import Status, line, make_status, text, to_json
from hpctrain.run.directory import RunDirectory, find_run


def show_status(name: str | None, *, as_json: bool) -> None:
    """A run; a line per point of a sweep; without a name a line per run under runs/."""
    if name is None:
        runs = [
            make_status(RunDirectory(p.parent.resolve())) for p in sorted(Path("runs").glob("*/config.yaml"))
        ]
        show_all(runs, as_json=as_json)
        return
    sweep = next(
        (
            p
            for p in (Path(name), Path("runs") / name, Path("runs") / f"{name}.sweep")
            if (p / "sweep.json").is_file()
        ),
        None,
    )
    if sweep is None:
        status = make_status(find_run(name))
        print(to_json(status) if as_json else text(status))
        return
    points = json.loads((sweep / "sweep.json").read_text())["points"]
    statuses = [make_status(RunDirectory((sweep / label).resolve())) for label in points]
    show_all(statuses, as_json=as_json)


def show_all(statuses: list[Status], *, as_json: bool) -> None:
    if as_json:
        print("[" + ",\n".join(to_json(status) for status in statuses) + "]")
    else:
        print("\n".join(line(status) for status in statuses) or "no runs under runs/")


def show_logs(run: RunDirectory, *, rank: int, follow: bool, as_json: bool) -> None:
    """What one rank printed, over all attempts; with `follow` until the run ends."""
    num_ranks = json.loads(run.plan.read_text())["world_size"] if run.plan.exists() else rank + 1
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"logs of rank {rank}", f"the run has ranks 0 to {num_ranks - 1}", "--rank 0")
    shown: dict[Path, int] = {}
    next_look = 0.0
    if as_json:
        print(json.dumps({"logs": [str(path) for path in sorted(run.logs.glob("*.log"))]}))
        return
    while True:
        files = sorted(run.logs.glob(f"*_{rank}.log"), key=lambda p: p.stat().st_mtime)
        for path in files:
            with path.open(errors="replace") as handle:
                handle.seek(shown.get(path, 0))
                new = handle.read()
                if new and path not in shown:
                    print(f"--- {path.name}")
                sys.stdout.write(new)
                shown[path] = handle.tell()
        sys.stdout.flush()
        if not follow:
            break
        if time.monotonic() > next_look:  # Slurm is not to be asked more often
            next_look = time.monotonic() + 30.0
            if make_status(run).state in ("COMPLETED", "FAILED", "STOPPED", "CANCELLED"):
                break
        time.sleep(1.0)
    if not shown:
        print(f"hpctrain: rank {rank} has printed nothing yet ({run.logs})", file=sys.stderr)


def cancel(run: RunDirectory) -> str:
    """Cancel the run's job for good; returns what was done. Raises RunError if nothing is there to cancel."""
    job = run.sent_job()
    if job and slurm.is_alive(job):
        slurm.cancel(job)
        return f"job {job} cancelled; hpctrain resume {run.name} goes on from the last checkpoint"
    if run.is_locked():
        run.stop.touch()
        return f"run {run.name} will save and end at its next step (STOP)"
    raise RunError(
        f"run {run.name} has nothing to cancel",
        "no live job and no supervisor",
        f"hpctrain status {run.name}",
    )


def main(verb: str, arguments: argparse.Namespace) -> int:
    if verb == "status":
        show_status(arguments.run, as_json=arguments.json)
        return 0
    run = find_run(arguments.run)
    if verb == "logs":
        show_logs(run, rank=arguments.rank, follow=arguments.follow, as_json=arguments.json)
    elif verb == "cancel":
        said = cancel(run)
        print(json.dumps({"run": str(run.path), "message": said}) if arguments.json else said)
    else:
        raise ConfigError(f"no verb {verb}")
    return 0
