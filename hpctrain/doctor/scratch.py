"""Do a node's own disks keep their files when a job is requeued? A job that requeues itself once finds out.

python -m hpctrain.doctor.scratch ANSWER    what the job runs, at both of its starts
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain import slurm
from hpctrain.config.load import user_conf_dir
from hpctrain.doctor.findings import Finding, notice, ok
from hpctrain.doctor.node_facts import scratch_folders
from hpctrain.launch.environment import allocation, node_name, scrubbed
from hpctrain.launch.snapshot import package_root
from hpctrain.run.directory import write_json


def answer_of(cluster_name: str) -> Path:
    """Where the answer for a cluster (Slurm's ClusterName) lies."""
    return user_conf_dir() / "cluster" / f"scratch_{cluster_name or 'cluster'}.json"


def send(answer: Path, options: Sequence[str]) -> str | None:
    """Send the job and return its number; None where Slurm does not take it. Nobody waits for it.

    Args:
        options: of sbatch, with the node that both starts have to be on.
    """
    answer.parent.mkdir(parents=True, exist_ok=True)
    answer.unlink(missing_ok=True)
    words = [sys.executable, "-m", "hpctrain.doctor.scratch", str(answer)]
    command = f"PYTHONPATH={shlex.quote(str(package_root()))} exec {shlex.join(words)}"
    fixed = ["--parsable", "--job-name=hpctrain-scratch", "--requeue", "--output=/dev/null", "--time=5"]
    try:
        done = subprocess.run(
            ["sbatch", *fixed, *options, f"--wrap={command}"],
            env=scrubbed(os.environ),
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition(";")[0] if done.returncode == 0 else None


def look(answer: Path) -> None:
    """First start: leave a file on every disk and requeue. Second: see which are still there."""
    where = allocation()
    assert where.job is not None
    marker = f".hpctrain_scratch_{where.job}"
    begun = answer.with_suffix(".begun")
    if where.restart == 0:
        paths = [str(each["path"]) for each in scratch_folders()]
        for path in paths:
            (Path(path) / marker).touch()
        write_json(begun, {"node": node_name(), "paths": paths})
        slurm.requeue(where.job)  # ends us
        return
    first = json.loads(begun.read_text())
    kept = {path: (Path(path) / marker).exists() for path in first["paths"]}
    for path in kept:
        (Path(path) / marker).unlink(missing_ok=True)
    write_json(answer, {"node": node_name(), "is_same_node": first["node"] == node_name(), "kept": kept})
    begun.unlink()


def scratch_findings(cluster_name: str) -> list[Finding]:
    """What the job found, if it has run."""
    try:
        answer: dict[str, Any] = json.loads(answer_of(cluster_name).read_text())
    except (OSError, json.JSONDecodeError):
        return []
    if not answer["is_same_node"] or not answer["kept"]:
        return []
    kept = [path for path, is_kept in answer["kept"].items() if is_kept]
    lost = [path for path, is_kept in answer["kept"].items() if not is_kept]
    said = [f"{', '.join(kept)} kept its files"] * bool(kept) + [f"{', '.join(lost)} did not"] * bool(lost)
    found = f"over a requeue on {answer['node']} {'; '.join(said)}"
    if lost:
        means = "what is unpacked or cached there is made anew at every start"
        return [notice("scratch", found, means, "keep data and environments on another disk")]
    return [ok("scratch", found)]


if __name__ == "__main__":
    look(Path(sys.argv[1]))
