"""Paths of a run directory, its switches, and its lock."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import ConfigError, RunError


@dataclass(frozen=True)
class RunDirectory:
    """A run on disk. Every path that anybody needs has its name here."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def source(self) -> Path:
        return self.path / "source.json"

    @property
    def data_facts(self) -> Path:
        return self.path / "data.json"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def job(self) -> Path:
        """The Slurm job that was sent last."""
        return self.path / "job.json"

    def sent_job(self) -> str | None:
        """Number of the Slurm job that was sent last; None if there is none or the run was started here."""
        if not self.job.exists():
            return None
        job = json.loads(self.job.read_text())["job"]
        return None if job is None else str(job)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def causes(self) -> Path:
        return self.path / "causes"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        """Traces of steps, and snapshots of GPU memory that ran out."""
        return self.path / "profile"

    @property
    def calibration(self) -> Path:
        """What `hpctrain calibrate` measured: sizes and seconds."""
        return self.path / "calibration.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def submit_script(self) -> Path:
        return self.path / "submit.sbatch"

    @property
    def submitit(self) -> Path:
        return self.path / "submitit"

    @property
    def stop(self) -> Path:
        """Switch: while it exists, the run saves and ends, and does not start."""
        return self.path / "STOP"

    @property
    def done(self) -> Path:
        """Switch: the run is finished; a start that finds it ends at once."""
        return self.path / "DONE"

    def create(self) -> None:
        for folder in (self.path, self.logs, self.causes, self.checkpoints, self.submitit):
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def lock(self, wait_s: float = 0.0) -> Iterator[None]:
        """Hold the run: at most one supervisor works in a folder. Raises RunError when it is held.

        `wait_s` gives a predecessor on a lost node the time to lose its lease (NFS).
        """
        deadline = time.monotonic() + wait_s
        with (self.path / ".lock").open("a") as handle:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if not isinstance(error, BlockingIOError):
                        raise RunError(
                            f"run {self.name} cannot be locked",
                            f"flock: {error.strerror}",
                            "mount the file system with locks (Lustre: flock), or choose another run_root",
                        ) from error
                    if time.monotonic() >= deadline:
                        raise RunError(
                            f"run {self.name} is already being worked on",
                            f"another supervisor holds {self.path / '.lock'}",
                            "wait for it, or `hpctrain cancel` it",
                        ) from None
                    time.sleep(1.0)
            yield

    def is_locked(self) -> bool:
        """Whether a supervisor that this host can see works in the folder."""
        if not (self.path / ".lock").exists():
            return False
        try:
            with self.lock():
                return False
        except RunError:
            return True


def find_run(text: str, run_root: str = "runs") -> RunDirectory:
    """The run that a user named by its folder or by its name under `runs/`. Raises ConfigError."""
    for candidate in (Path(text), Path(run_root) / text):
        if (candidate / "config.yaml").is_file():
            return RunDirectory(candidate.resolve())
    known = sorted(p.parent.name for p in Path(run_root).glob("*/config.yaml"))
    raise ConfigError(
        f"no run {text!r}",
        f"runs here: {', '.join(known) or 'none'}",
        "give the run's folder or its name under runs/",
    )


def free_name(run_root: str, stem: str) -> str:
    """`<stem>-1`, or the next one that is not there."""
    names = (f"{stem}-{number}" for number in itertools.count(1))
    return next(name for name in names if not (Path(run_root) / name).exists())


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all: a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with temporary.open("w") as handle:
        json.dump(value, handle, indent=1, sort_keys=True)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.rename(path)


def make_attempt(job: str, restart: int, attempt_in_start: int) -> str:
    """`<job>_<restart>_<try>`: one launch of the ranks. An array element's job is written `12-3`."""
    return f"{job.replace('_', '-')}_{restart}_{attempt_in_start}"
