"""The selftest as a user calls it on a cluster: a job that is requeued in the middle, and a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from tests.helpers.polling import wait_until
from tests.helpers.runs import ROOT, Cluster, Run
from tests.helpers.sandbox import Sandbox

pytestmark = [pytest.mark.slurm, pytest.mark.long]  # minutes of two cores


def test_every_check_passes_on_two_nodes_and_the_job_comes_back_from_its_preemption(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "hpctrain", "selftest", "cluster=sandbox", "--json"]
    command += ["data.synthetic_documents=200", "data.num_workers=0"]
    env = {**os.environ, **sandbox.env, "PYTHONPATH": str(ROOT)}
    waiting = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    try:
        directory = RunDirectory(tmp_path / "runs" / "selftest-1")
        wait_until(lambda: directory.job.exists() or waiting.poll() is not None, 60, "a job that was sent")
        job = directory.sent_job()
        assert job is not None
        run = Run(Cluster(sandbox, tmp_path, tmp_path), directory, job)
        assert run.wait_until_over(300) == "COMPLETED", run.story()
        table = json.loads(waiting.communicate(timeout=60)[0])
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode == 0 and table["passed"], run.story()
    assert (table["ranks"], table["nodes"], table["backend"]) == (4, 2, "Gloo")
    layouts = [each["check"] for each in table["checks"]]
    assert len(layouts) >= 15 and layouts[-1] == "the same run, preempted and gone on with"
    attempts = run.attempts()
    assert [a.end["cause"] for a in attempts if a.end] == ["preemption", "done"]
    assert attempts[1].start["restart"] == 1 and attempts[1].restored_step
    begun = [e["check"] for e in Ledger(directory.ledger).events() if e["event"] == "begun"]
    assert len(begun) == len(set(begun)), "a check was done twice"
