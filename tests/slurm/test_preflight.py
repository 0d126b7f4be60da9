"""Preflight on the sandbox, with pretended cards: a fake nvidia-smi says what each node has."""

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

pytestmark = pytest.mark.slurm

RUN = ["+exp=vision_city_laptop", "cluster=sandbox", "cluster.num_nodes=4"]

# Answers a --query-gpu in the order it was asked in; node2 has an ECC error, a narrow link on node1.
NVIDIA_SMI = """\
#!/usr/bin/env python3
import os, sys
node = os.environ.get("SLURMD_NODENAME")
query = next((a.partition("=")[2] for a in sys.argv[1:] if a.startswith("--query-gpu=")), None)
if query is None:
    print("| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: 13.0 |")
    sys.exit(0)
for index in range(2):
    has = {"index": index, "name": "NVIDIA GeForce RTX 4090", "driver_version": "580.65.06"}
    has |= {"pcie.link.width.current": 16, "pcie.link.width.max": 16, "memory.used": 1}
    if node == "node2" and index == 1:
        has["ecc.errors.uncorrected.volatile.total"] = 5
    if node == "node1" and index == 0:
        has["pcie.link.width.current"] = 4
    print(", ".join(str(has.get(field, "[N/A]")) for field in query.split(",")))
"""


def hpctrain(sandbox: Sandbox, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **sandbox.env, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hpctrain", *argv]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=180)


def test_bad_nodes_are_named_and_doctor_remembers_them(sandbox: Sandbox, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text(NVIDIA_SMI)
    fake.chmod(0o755)
    done = hpctrain(
        sandbox, tmp_path, "preflight", *RUN, f"cluster.setup=['export PATH={fake.parent}:$PATH']"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "leave out: cluster.exclude=node1,node2"
    assert "    bad: GPU 1: 5 uncorrected ECC errors" in done.stdout
    assert "    bad: GPU 0: PCIe width x4, others x16" in done.stdout
    report: dict[str, Any] = json.loads((tmp_path / "runs/preflight/preflight.json").read_text())
    verdicts = {node: each["verdict"] for node, each in report["nodes"].items()}
    assert verdicts == {"node0": "ok", "node1": "bad", "node2": "bad", "node3": "ok"}
    ends = [(link["from"], link["to"]) for link in report["links"]]
    assert len(set(ends)) == 8 and all(link["gbps"] for link in report["links"])  # two neighbours each
    assert report["fabric"]["lossless"] is None  # a loopback has no counters of cards

    judged = hpctrain(sandbox, tmp_path, "doctor", *RUN, "cluster.device=cuda", "--json")
    findings = {f["topic"]: f for f in json.loads(judged.stdout)["findings"]}
    assert findings["last preflight"]["change"].startswith("cluster.exclude=node1,node2")
    assert findings["driver"]["level"] == "ok" and "580.65.06 on 4 nodes" in findings["driver"]["found"]


def test_inside_an_allocation_its_nodes_are_checked(sandbox: Sandbox, tmp_path: Path) -> None:
    """As sbatch/preflight.sbatch does, on the nodes that are there; these are well."""
    log = tmp_path / "log"
    options = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--gres=gpu:rtx4090:2"]
    options += [f"--output={log}", f"--chdir={tmp_path}", f"--export=ALL,HPCTRAIN_PYTHON={sys.executable}"]
    script = str(ROOT / "sbatch" / "preflight.sbatch")
    env = {**sandbox.env, "PYTHONPATH": str(ROOT)}
    sent = subprocess.run(
        ["sbatch", "--parsable", *options, script, *RUN], env=env, capture_output=True, text=True, check=True
    )
    job = sent.stdout.strip()
    sandbox.wait_for(lambda: sandbox.job_state(job) in ("COMPLETED", "FAILED"), 90, "the end of the check")
    assert sandbox.job_state(job) == "COMPLETED", log.read_text()
    assert "2 nodes, none is bad" in log.read_text()
    assert (tmp_path / "runs/preflight/1/preflight.json").exists()
