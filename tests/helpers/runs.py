"""Runs on the sandbox: submit them as a user does, watch them from outside, compare what they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint import reader, store
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt, Ledger
from tests.helpers.polling import wait_until
from tests.helpers.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[2]
FACES = ROOT.parent / "shared" / "data" / "orl_faces"

# Small enough for two cores, long enough to be interrupted: 30 people, 300 images, 10 steps an epoch.
SMALL = [
    "+exp=vision_city_laptop",
    "cluster=sandbox",
    "data=shards",
    "data.num_workers=1",
    "optim.global_batch_size=32",
    "cluster.ranks_per_node=1",
    "log_every_steps=1",
    "eval_every_epochs=0",
]


@dataclass
class Cluster:
    """The sandbox with a folder in which runs live and the packed faces to train on."""

    sandbox: Sandbox
    folder: Path
    data: Path

    def cli(
        self, *argv: str, check: bool = True, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`python -m hpctrain …` on the login node."""
        command = [sys.executable, "-m", "hpctrain", *argv]
        env = {
            **os.environ,
            **self.sandbox.env,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(
            command, cwd=cwd or self.folder, env=env, capture_output=True, text=True, timeout=120
        )
        if check and done.returncode:
            raise AssertionError(
                f"{' '.join(argv)} exited with {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    def submit(self, name: str, *overrides: str) -> Run:
        return self.submit_exactly(*SMALL, f"data.root={self.data}", f"name={name}", *overrides)

    def submit_exactly(self, *arguments: str) -> Run:
        facts = json.loads(self.cli(*arguments, "--json").stdout.splitlines()[-1])
        return Run(self, RunDirectory(Path(facts["run"])), facts["job"])

    def preempt(self, *options: str) -> str:
        """Send an urgent job over the nodes; returns its number."""
        chosen = options or ("--nodes=4",)
        return self.sandbox.sbatch(
            "-p", "urgent", "--exclusive", "-o", "/dev/null", *chosen, "--wrap", "true"
        )


@dataclass
class Run:
    """A submitted run."""

    cluster: Cluster
    directory: RunDirectory
    job: str

    def steps(self) -> list[int]:
        """Steps as metrics.jsonl has them, in the order they were done."""
        return [r["step"] for r in self.metrics("train")]

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        if not self.directory.metrics.exists():
            return []
        lines = self.directory.metrics.read_text().splitlines()
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [r for r in records if r["kind"] == kind]

    def wait_for_step(self, step: int, timeout_s: float = 120) -> None:
        self.wait(lambda: max(self.steps(), default=0) >= step, timeout_s, f"step {step}")

    def wait(self, predicate: Any, timeout_s: float, what: str) -> None:
        try:
            wait_until(predicate, timeout_s, what)
        except Exception as error:
            raise AssertionError(f"{error}\n{self.story()}") from error

    def state(self) -> str:
        return self.cluster.sandbox.job_state(self.job)

    def wait_until_over(self, timeout_s: float = 180) -> str:
        """Wait for the end, hurrying requeues along; returns `hpctrain status`'s word for it."""

        def over() -> bool:
            state = self.state()
            if state == "PENDING":
                self.cluster.sandbox.speed_up_requeue(self.job)
            return state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

        self.wait(over, timeout_s, f"the end of job {self.job}")
        return str(self.status()["state"])

    def status(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(
            self.cluster.cli("status", str(self.directory.path), "--json").stdout
        )
        return facts

    def attempts(self) -> list[Attempt]:
        return Ledger(self.directory.ledger).attempts()

    def final(self) -> dict[str, Any]:
        """The whole last checkpoint."""
        path = store.latest(self.directory.checkpoints)
        assert path is not None
        return reader.load_full(path)

    def samples_hash(self) -> str:
        saved = Ledger(self.directory.ledger).last("saved")
        assert saved is not None
        return str(saved["samples_hash"])

    def story(self) -> str:
        """What a failing test has to show."""
        parts = [self.directory.ledger.read_text() if self.directory.ledger.exists() else "no ledger"]
        parts += [
            f"--- {p.name}\n{p.read_text()[-2500:]}" for p in sorted(self.directory.submitit.glob("*.out"))
        ]
        logs = sorted(self.directory.logs.glob("*.log"), key=lambda p: p.stat().st_mtime)
        parts += [f"--- {p.name}\n{p.read_text()[-2500:]}" for p in logs[-4:]]
        return "\n".join(parts)


def assert_every_step_once(attempts: Iterable[Attempt], num_steps: int) -> None:
    """Each attempt begins at the step that the one before had saved, does nothing twice, and the last one
    ends at the last step."""
    position = 0
    for attempt in attempts:
        assert attempt.restored_step == position, (
            f"{attempt.name} began at {attempt.restored_step}, not {position}"
        )
        assert attempt.end is not None
        # A start after the last step may have only the evaluation left to do: it saves nothing.
        saved = position if attempt.saved_step is None else attempt.saved_step
        assert attempt.end["last_step"] == saved, f"{attempt.name} did steps that it did not save"
        position = saved
    assert position == num_steps


def differing_tensors(one: Any, other: Any, path: str = "") -> list[str]:
    """Names of all tensors and values that are not equal bit for bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), f"{path}: {one.keys() ^ other.keys()}"
        return [name for key in one for name in differing_tensors(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [path]
    return [] if one == other else [path]
