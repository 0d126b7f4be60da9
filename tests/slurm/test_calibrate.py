"""A calibration as a user calls it on a cluster: a job on two nodes, and a file of figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.config.hardware import parse_hardware
from tests.helpers.runs import ROOT
from tests.helpers.sandbox import Sandbox
from tests.launch.test_calibrate import QUICK

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_a_job_on_two_nodes_measures_the_links_between_them(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(QUICK)
    command = [sys.executable, "-m", "hpctrain", "calibrate", "cluster=sandbox", "cluster.ranks_per_node=1"]
    env = {**os.environ, **sandbox.env, "PYTHONPATH": f"{tmp_path}:{ROOT}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, "--name", "mine", "--json"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    path = tmp_path / ".config/hpctrain/cluster/hardware/mine.yaml"
    assert told["file"] == str(path)
    hardware = parse_hardware("mine", path.read_text(), str(path))
    assert {"network_gbps", "network_latency_us", "storage_total_gbps", "fp32_tflops"} <= set(
        hardware.figures
    )
    assert f"job {told['job']}, 2 nodes x 1 ranks" in hardware.figures["network_gbps"].source
    assert "node2_gbps" not in hardware  # a node had one rank
