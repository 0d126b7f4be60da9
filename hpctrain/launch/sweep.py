"""A sweep: one job array, one run directory per point, no waiting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpctrain.config.schema import ClusterKind, Config
from hpctrain.errors import ConfigError
from hpctrain.launch import script, submit
from hpctrain.launch.snapshot import current_code
from hpctrain.launch.supervise import supervise
from hpctrain.plan.plan import RunPlan
from hpctrain.run.directory import RunDirectory, write_json

Point = tuple[str, list[str], Config]  # label, overrides, config


def check_alike(configs: list[Config]) -> None:
    """Refuse points that cannot be elements of one array. Raises ConfigError."""
    first = configs[0]
    if first.cluster.kind is not ClusterKind.slurm:
        raise ConfigError(
            "a sweep goes to Slurm as one job array",
            f"cluster.kind={first.cluster.kind.name}",
            "choose a Slurm cluster, or start the points one by one",
        )
    if any(config.cluster != first.cluster for config in configs):
        raise ConfigError(
            "the sweep varies cluster.*", "elements of one array share their resources", "sweep other keys"
        )
    if first.cluster.num_nodes == -1:
        raise ConfigError(
            "cluster.num_nodes=-1 in a sweep",
            "elements of one array have the same nodes",
            "cluster.num_nodes=N; `hpctrain plan` of one point says how many",
        )


def submit_sweep(points: list[Point]) -> str:
    """Send every point that is not done as an element of one array; returns what to tell the user.

    The sweep's folder is `<run_root>/<name>.sweep`, a point's folder is its label inside it, and
    `sweep.json` lists them. All points are checked before any is sent. Raises HpctrainError.
    """
    first = points[0][2]
    check_alike([config for _, _, config in points])
    script.check_options(first.cluster)
    script.check_sbatch()
    root = Path(first.run_root) / f"{first.name}.sweep"
    todo: list[tuple[Config, RunPlan, RunDirectory]] = []
    for point in points:
        label, _, config = point
        config.run_root, config.name = str(root), label
        if submit.done_already(config):
            continue
        plan, run = submit.checked_plan(config), submit.run_directory(config)
        submit.check_identity(run, config)
        submit.check_not_live(run)
        submit.check_not_stopped(run)
        todo.append((config, plan, run))
    if not todo:
        return f"sweep {root.name}: all {len(points)} points are done ({root})"
    for config, plan, _ in todo:
        submit.freeze(config, plan)
    runs = [run for _, _, run in todo]
    jobs = _send(first, root, runs)
    for run, job in zip(runs, jobs, strict=True):
        write_json(run.job, {"job": job})
    _write_manifest(root, points, {run.name: job for run, job in zip(runs, jobs, strict=True)})
    array = jobs[0].partition("_")[0]
    return (
        f"job array {array}: {len(todo)} points of sweep {root.name}\n"
        f"  folder  {root}\n  follow  hpctrain status {root}"
    )


def _send(first: Config, root: Path, runs: list[RunDirectory]) -> list[str]:
    folder = root / "submitit"
    folder.mkdir(parents=True, exist_ok=True)
    with script.clean_environment():
        executor = script.make_executor(first, folder, current_code(runs[0].code))
        at_once = first.cluster.array_parallelism or len(runs)
        executor.update_parameters(job_name=f"hpctrain-{root.name}", array_parallelism=at_once)
        try:
            jobs = executor.map_array(supervise, [str(run.path) for run in runs])
        except Exception as error:  # submitit raises its own and subprocess's errors
            raise script.refused(error) from error
    return [job.job_id for job in jobs]


def _write_manifest(root: Path, points: list[Point], jobs: dict[str, str]) -> None:
    """Merge these points into the sweep's manifest: a later sweep over more values keeps the earlier ones."""
    path = root / "sweep.json"
    known: dict[str, Any] = json.loads(path.read_text())["points"] if path.exists() else {}
    for label, overrides, _ in points:
        entry = known.setdefault(label, {"overrides": overrides})
        entry["job"] = jobs.get(label, entry.get("job"))
    write_json(path, {"points": known})
