"""`plan --trace --slurm`: the same trace as here, by a small job without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import ROOT
from tests.helpers.sandbox import Sandbox

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_a_job_traces_what_a_login_node_traces(sandbox: Sandbox, tmp_path: Path) -> None:
    def trace(*options: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "hpctrain", "plan", "+exp=finance_callbot_laptop", "cluster=sandbox"]
        env = {**os.environ, **sandbox.env, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
        argv = [*command, "--json", "--trace", *options]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        rows: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index('{"trace"') :])["trace"]
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    by_job = trace("--slurm")
    assert [row["place"] for row in by_job] == [0, 1]
    assert by_job == trace()
