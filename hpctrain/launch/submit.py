"""From a typed config to a submitted job: check, freeze into the run directory, send through submitit."""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain import slurm
from hpctrain.config.load import load_config, read_yaml, save_config, to_dict
from hpctrain.config.schema import (
    ClusterKind,
    Config,
)
from hpctrain.errors import ClusterError, ConfigError, PlanError
from hpctrain.launch.environment import allocation, submit_folder
from hpctrain.launch.inputs import check_data, check_model, draw_data, find_workload
from hpctrain.launch.script import check_options, check_sbatch, clean_environment, make_executor, refused
from hpctrain.launch.snapshot import code_digest, current_code, freeze_code, package_root, source_facts
from hpctrain.launch.supervise import supervise
from hpctrain.plan.forecast_text import time_findings
from hpctrain.plan.plan import RunPlan, make_plan
from hpctrain.plan.sizing import choose
from hpctrain.run.directory import RunDirectory, write_json
from hpctrain.run.exhausted import find_out_of_memory
from hpctrain.run.identity import differences, digest
from hpctrain.run.ledger import Ledger


@dataclass(frozen=True)
class Submitted:
    """What became of a submission."""

    run: RunDirectory
    job: str | None  #: None when the run was already done, or ran here
    message: str
    has_trained: bool = False  #: it ran here, to its end

    def to_json(self) -> str:
        return json.dumps({"run": str(self.run.path), "job": self.job, "message": self.message})

    def text(self) -> str:
        if self.job is None:
            return f"run {self.run.name} {self.message} ({self.run.path})"
        return (
            f"job {self.job} submitted for run {self.run.name}\n"
            f"  folder  {self.run.path}\n"
            f"  follow  hpctrain status {self.run.path}   hpctrain logs -f {self.run.path}"
        )


def run_directory(config: Config) -> RunDirectory:
    assert config.name is not None
    return RunDirectory(Path(config.run_root) / config.name)


def checked_plan(config: Config) -> RunPlan:
    """The plan, once everything that can be known ahead of queueing is known. What the planner was asked to
    choose is filled in. Raises HpctrainError with all findings together."""
    try:
        plan = planned(config)
    except PlanError as refusal:
        try:
            check_data(config)
        except ConfigError as missing:
            raise PlanError(f"{refusal}\n  - {missing.asked}: {missing.found}; {missing.change}") from None
        raise
    check_data(config)
    check_model(config.model)
    return plan


def planned(config: Config) -> RunPlan:
    """Fill in what the planner is asked to choose, the number of nodes and the layout, and plan. Raises
    PlanError."""
    exhausted = find_out_of_memory(Path(config.run_root))
    workload = find_workload(config)
    chosen = choose(config, workload, frozenset(exhausted))
    config.cluster, config.parallelism = chosen.cluster, chosen.parallelism
    return make_plan(config, workload, exhausted, done_steps=_saved_step(config))


def _saved_step(config: Config) -> int:
    """The step that a start of this run would go on from."""
    if config.name is None or not run_directory(config).ledger.exists():
        return 0
    attempts = Ledger(run_directory(config).ledger).attempts()
    return max((attempt.saved_step or 0 for attempt in attempts), default=0)


def done_already(config: Config) -> Submitted | None:
    """What there is to say of a run that is done: no plan could change it."""
    run = run_directory(config)
    if not run.done.exists():
        return None
    check_identity(run, config)
    return Submitted(run, None, "is done already")


def check_partition(config: Config, plan: RunPlan) -> None:
    """Refuse a time limit that the partition does not allow, and a partition whose own limit is too short to
    get on: Slurm takes both jobs, and lets the first wait for ever. Raises PlanError."""
    cluster = config.cluster
    partition = None
    with suppress(ClusterError):  # sbatch will say what is wrong
        name = cluster.partition
        wanted = (each for each in slurm.partitions() if (each.name == name if name else each.is_default))
        partition = next(wanted, None)
    if partition is None or config.plan.force:
        return
    limit_min, most_s = cluster.time_limit_min, partition.max_time_s
    if limit_min is not None and most_s is not None and limit_min * 60 > most_s:
        raise PlanError(
            f"cluster.time_limit_min={limit_min}, but partition {partition.name} allows {most_s // 60} "
            "minutes, and the job would wait for ever; a shorter limit (the run requeues itself), or another "
            "partition"
        )
    own_s = partition.default_time_s or most_s
    if limit_min is None and own_s is not None:
        limited = replace(config, deadline=None, cluster=replace(cluster, time_limit_min=own_s // 60))
        if found := time_findings(limited, plan.forecast):
            raise PlanError(
                f"partition {partition.name} gives {own_s // 60} minutes unless asked: {found[0]}"
            )


def check_identity(run: RunDirectory, config: Config) -> None:
    """A folder belongs to one run: the same identity resumes it, another one is refused."""
    if not run.config.exists():
        return
    different = differences(to_dict(load_config(run.config)), to_dict(config))
    if different:
        listed = "\n         ".join(different)
        raise ConfigError(
            f"run {run.name} exists with another identity",
            listed,
            f"name={run.name}-{digest(to_dict(config))}, or take the values of the first submission",
        )


def check_code_knows(run: RunDirectory, config: Config) -> None:
    """Code that was frozen by an older hpctrain refuses keys that are newer."""
    newer = sorted(_keys(to_dict(config)) - _keys(read_yaml(run.config)))
    if newer:
        raise ConfigError(
            f"resume {run.name} with the code that was frozen",
            f"it is older than {', '.join(newer[:4])} of the config",
            f"hpctrain resume {run.name} --code=now",
        )


def _keys(fields: Any, depth: int = 2) -> set[str]:
    """Names of the outer levels of a config; deeper ones are tables that users fill."""
    if not isinstance(fields, dict) or not depth:
        return set()
    inner = {f"{key}.{name}" for key, value in fields.items() for name in _keys(value, depth - 1)}
    return set(fields) | inner


def check_not_stopped(run: RunDirectory) -> None:
    """A start that finds STOP ends at once: say so now."""
    if run.stop.exists():
        raise ConfigError(
            f"run {run.name} was told to stop",
            f"{run.stop} exists, and a start that finds it ends at once",
            f"hpctrain resume {run.name}, which removes it",
        )


def check_not_live(run: RunDirectory) -> None:
    """One live job per folder."""
    if run.is_locked():
        raise ConfigError(f"run {run.name} is running", f"in {run.path}", f"hpctrain status {run.name}")
    job = run.sent_job()
    if job and slurm.is_alive(job):
        raise ConfigError(
            f"run {run.name} has a live job",
            f"job {job}",
            f"hpctrain status {run.name}, or hpctrain cancel {run.name}",
        )


def freeze(config: Config, plan: RunPlan, *, new_code: bool = True) -> RunDirectory:
    """Write everything that the job will read. Raises ConfigError when the folder is not free for it."""
    run = run_directory(config)
    check_identity(run, config)
    check_not_live(run)
    check_not_stopped(run)
    if not new_code:
        check_code_knows(run, config)
    draw_data(config.data)
    run.create()
    if new_code or not (run.code / "current").exists():
        freeze_code(run.code)
        write_json(run.source, source_facts(sys.argv))
    save_config(config, run.config)
    run.plan.write_text(plan.to_json())
    Ledger(run.ledger).append("frozen", code=current_code(run.code).name)
    return run


def submit(config: Config, plan: RunPlan, *, new_code: bool = True) -> Submitted:
    """Send the run behind a `checked_plan`; `cluster.kind=local`: carry it out here. Raises HpctrainError."""
    if done := done_already(config):
        return done
    if config.cluster.kind is ClusterKind.local:
        return run_here(config, plan, new_code=new_code)
    check_options(config.cluster)
    check_sbatch()
    check_partition(config, plan)
    run = freeze(config, plan, new_code=new_code)
    with clean_environment():
        executor = make_executor(config, run.submitit, current_code(run.code))
        try:
            job = executor.submit(supervise, str(run.path))
        except Exception as error:  # submitit raises its own and subprocess's errors
            if not Ledger(run.ledger).attempts():
                run.config.unlink()  # it never began: the name is free for another identity
            raise refused(error) from error
    shutil.copyfile(run.submitit / f"{job.job_id}_submission.sh", run.submit_script)
    write_json(run.job, {"job": job.job_id})
    return Submitted(run, job.job_id, "submitted")


def run_here(config: Config, plan: RunPlan, *, new_code: bool = True) -> Submitted:
    """Carry the run out on this machine, or in the allocation around us, in the foreground."""
    run = freeze(config, plan, new_code=new_code)
    write_json(run.job, {"job": None})
    supervise(str(run.path))
    is_done = run.done.exists()
    hint = "is done" if is_done else f"is not done; hpctrain resume {run.name} goes on"
    return Submitted(run, None, hint, has_trained=is_done)


def run_foreground(config: Config) -> Submitted:
    """The verb `run`: here and now. Inside an allocation the ranks go over its nodes.

    The first start of sbatch/train.sbatch comes through here; it notes the run directory under the job's
    number, so that later starts read only what this one froze.
    """
    plan = checked_plan(config)
    if config.cluster.kind is ClusterKind.local:
        return run_here(config, plan)
    check_options(config.cluster)
    job = allocation().job
    if job is None:
        raise ConfigError(
            f"run with cluster.kind={config.cluster.kind.name}",
            "there is no Slurm allocation around this command",
            "submit it, call sbatch sbatch/train.sbatch, or take cluster=local",
        )
    run = freeze(config, plan)
    write_json(run.job, {"job": job})
    note = submit_folder() / ".hpctrain" / f"job_{job}"
    note.parent.mkdir(exist_ok=True)
    note.write_text(f"{run.path}\n")
    code = str(current_code(run.code))
    path = os.pathsep.join(filter(None, [code, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    sys.stdout.flush()
    os.execve(
        sys.executable, [sys.executable, "-u", "-m", "hpctrain.launch.supervise", str(run.path)], environment
    )


def render(config: Config) -> str:
    """The batch script that `submit` would send, byte for byte."""
    if config.cluster.kind is ClusterKind.local:
        raise ConfigError(
            "render prints what goes to Slurm",
            "cluster.kind=local sends nothing",
            "choose a Slurm cluster: cluster=rtx4090",
        )
    planned(config)
    check_options(config.cluster)
    run = run_directory(config)
    with clean_environment():
        code = run.code / code_digest(package_root())
        executor = make_executor(config, run.submitit, code)
        return str(executor._make_submission_file_text(executor._submitit_command_str, "render"))
