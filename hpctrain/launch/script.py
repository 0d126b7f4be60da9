"""The batch script: submitit's executor with our options, and what may not be put into it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpctrain import slurm
from hpctrain.config.schema import ClusterConfig, Config
from hpctrain.errors import ClusterError, ConfigError
from hpctrain.launch.environment import scrubbed
from hpctrain.launch.ranks import gpu_option
from hpctrain.launch.snapshot import current_code, freeze_code

# Options that have a key of their own, and those that the stop contract rests on.
PROTECTED = {
    "account", "array", "chdir", "comment", "constraint", "cpus-per-task", "error", "exclude", "exclusive",
    "gpus-per-node", "gpus-per-task", "gres", "input", "job-name", "mail-type", "mail-user", "mem",
    "no-requeue", "nodelist", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "partition",
    "qos", "requeue", "reservation", "signal", "time", "wrap",
}  # fmt: skip
PROTECTED_SRUN = {
    "cpus-per-task", "error", "export", "gpus-per-node", "gres", "input", "jobid", "kill-on-bad-exit",
    "multi-prog", "no-kill", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "pty", "wait",
}  # fmt: skip


def check_sbatch() -> None:
    if shutil.which("sbatch") is None:
        raise ClusterError(
            "this run goes to Slurm",
            "sbatch is not installed here",
            "submit on a login node, or cluster=local",
        )


def setup_lines(cluster: ClusterConfig, code: Path) -> list[str]:
    """Shell lines ahead of the supervisor: it must import the frozen code, wherever sbatch was called."""
    return [
        *cluster.setup,
        f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
        "export PYTHONSAFEPATH=1",
    ]


def make_executor(config: Config, folder: Path, code: Path) -> Any:
    """submitit's Slurm executor with every option of this run."""
    import submitit

    class Executor(submitit.SlurmExecutor):
        """Rendering a script needs no Slurm; sending one asks `check_sbatch`."""

        @classmethod
        def affinity(cls) -> int:
            return 1

    # exec: the supervisor is the batch step's own process and outlives a scancel by KillWait.
    python = f"exec {shlex.quote(config.cluster.python or sys.executable)}"
    executor = Executor(folder=folder, python=python)
    executor.update_parameters(
        job_name=f"hpctrain-{config.name}",
        wckey=None,
        use_srun=False,
        stderr_to_stdout=True,
        setup=setup_lines(config.cluster, code),
        **_parameters(config.cluster),
    )
    return executor


def _parameters(cluster: ClusterConfig) -> dict[str, Any]:
    """What submitit calls the options of this cluster."""
    named = (
        "partition",
        "account",
        "qos",
        "constraint",
        "exclude",
        "mail_user",
        "mail_type",
        "comment",
        "nodelist",
    )
    parameters: dict[str, Any] = {name: getattr(cluster, name) for name in named if getattr(cluster, name)}
    # An option without a value, such as contiguous, is given as ''.
    additional: dict[str, Any] = {"requeue": True, **{k: v or True for k, v in cluster.extra_sbatch.items()}}
    if cluster.reservation:
        additional["reservation"] = cluster.reservation
    for option in gpu_option(cluster):
        key, _, value = option.removeprefix("--").partition("=")
        additional[key.replace("-", "_")] = value
    if cluster.mem_gib is not None:
        parameters["mem"] = f"{cluster.mem_gib}G"
    if cluster.exclusive:
        parameters["exclusive"] = True
    return {
        **parameters,
        "time": cluster.time_limit_min,
        "nodes": cluster.num_nodes,
        "ntasks_per_node": cluster.ranks_per_node,
        "cpus_per_task": cluster.cpus_per_rank,
        "signal_delay_s": cluster.signal_lead_s,
        "additional_parameters": additional,
    }


def check_options(cluster: ClusterConfig) -> None:
    """Values must stay values in the script, and the stop contract's options are ours. Raises ConfigError."""
    texts = {f"cluster.{name}": value for name, value in vars(cluster).items() if isinstance(value, str)}
    texts |= {f"cluster.extra_sbatch.{key}": str(value) for key, value in cluster.extra_sbatch.items()}
    texts |= {f"cluster.extra_sbatch key {key!r}": key for key in cluster.extra_sbatch}
    for argument in cluster.extra_srun:
        name = argument.removeprefix("--").partition("=")[0]
        if not argument.startswith("--") or any(option.startswith(name) for option in PROTECTED_SRUN):
            raise ConfigError(
                f"cluster.extra_srun: {argument!r} cannot be set here",
                "an argument is written --name=value, and what hpctrain rests on it sets itself",
            )
    for key, text in texts.items():
        if any(ord(character) < 32 or ord(character) == 127 for character in text):
            raise ConfigError(f"{key}={text!r}", "it holds a line break or another control character")
    for key in cluster.extra_sbatch:
        if not key.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(
                f"cluster.extra_sbatch: {key!r} is no sbatch option", "options are letters and dashes"
            )
        # sbatch takes any unambiguous beginning of an option for the option.
        if any(option.startswith(key.replace("_", "-")) for option in PROTECTED):
            raise ConfigError(
                f"cluster.extra_sbatch.{key} cannot be set here",
                "hpctrain sets it itself, to stop and requeue safely or from a key of its own",
                f"cluster.{key.replace('-', '_')} if there is one (hpctrain --cfg job), else leave it out",
            )


@contextmanager
def clean_environment() -> Iterator[None]:
    """Hide what an allocation around us has set: sbatch and the job would take it for their own."""
    saved = dict(os.environ)
    kept = scrubbed(saved)
    for name in saved.keys() - kept.keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(saved)


def refused(error: Exception) -> ClusterError:
    """sbatch's own words in our form."""
    words = str(getattr(error, "stderr", None) or error).strip().splitlines()
    said = [line for line in words if "sbatch: error" in line] or words[-1:]
    text = "; ".join(line.replace("sbatch: error: ", "").strip() for line in said)
    change = (
        "see `sinfo` for partitions and `sacctmgr show assoc user=$USER` for accounts, then set cluster.*"
    )
    if re.search("contact slurm|configless|DNS SRV|Could not establish a configuration", text):
        change = "submit on a login node with its SLURM_CONF; cluster=local, or `make sandbox`, needs none"
    return ClusterError("Slurm refused the job", text, change)


def send_function(config: Config, folder: Path, function: Callable[[str], None]) -> str:
    """Send `function(folder)` as a job of its own, which runs the present code; returns the job. Raises
    ClusterError when Slurm refuses it."""
    freeze_code(folder / "code")
    with clean_environment():
        executor = make_executor(config, folder / "submitit", current_code(folder / "code"))
        try:
            return str(executor.submit(function, str(folder)).job_id)
        except Exception as error:  # submitit raises its own and subprocess's errors
            raise refused(error) from error


def last_words(folder: Path) -> str:
    """The end of what the job of `send_function` printed."""
    logs = sorted((folder / "submitit").glob("*.out"))
    return logs[-1].read_text(errors="replace").strip()[-1500:] if logs else "it left no log"


def wait_for_job(job: str, look_s: float, progress: Callable[[], str] = lambda: "") -> None:
    """Return when the job is over; meanwhile say on stderr how it stands, and what `progress` adds."""
    told = ""
    while True:
        found = slurm.job(job)
        text = f"job {job} {found.state if found else 'is over'}{progress()}"
        if text != told:
            print(text, file=sys.stderr, flush=True)
            told = text
        if found is None or found.state in slurm.TERMINAL_STATES:
            return
        time.sleep(look_s)
