"""The doctor on real clusters: one that is set up well, and one that is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.run.ledger import Ledger
from tests.helpers.runs import ROOT
from tests.helpers.sandbox import Sandbox

pytestmark = pytest.mark.slurm

RUN = ["+exp=vision_city_laptop", "cluster=sandbox"]


def hpctrain(sandbox: Sandbox, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command on the login node, with `folder` as working and as home directory."""
    env = {**os.environ, **sandbox.env, "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    command = [sys.executable, "-m", "hpctrain", *argv]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def examined(sandbox: Sandbox, folder: Path, *overrides: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Exit code and findings by topic."""
    done = hpctrain(sandbox, folder, "doctor", *RUN, *overrides, "--json")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    findings: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        findings.setdefault(finding["topic"], []).append(finding)
    return done.returncode, findings


def levels(findings: dict[str, list[dict[str, Any]]], level: str) -> set[str]:
    return {topic for topic, found in findings.items() if any(f["level"] == level for f in found)}


def note_save(folder: Path, seconds: float) -> None:
    """An earlier start of the run has measured a save."""
    run = folder / "runs" / "vision_city_laptop"
    run.mkdir(parents=True)
    Ledger(run / "ledger.jsonl").append("saved", attempt="1_0_1", step=10, save_s=seconds)


def test_a_good_cluster_has_no_problem_and_nothing_to_notice(sandbox: Sandbox, tmp_path: Path) -> None:
    note_save(tmp_path, 2.0)
    code, findings = examined(sandbox, tmp_path, "cluster.num_nodes=4")
    assert (code, levels(findings, "problem"), levels(findings, "notice")) == (0, set(), set())
    (start,) = findings["earliest start"]
    assert "1 node now" in start["found"] and "4 nodes now" in start["found"]
    assert findings["GraceTime"][0]["found"].startswith("20 s (partition train); a save takes 2 s")
    (resource,) = findings["dominant resource"]
    assert "25%" in resource["found"]  # 8 of 32 GPUs
    assert findings.keys() >= {
        "KillWait",
        "JobRequeue",
        "RequeueExit",
        "MaxArraySize",
        "MinJobAge",
        "fair share",
    }


def test_a_run_that_asks_for_what_is_not_there_is_told_what_is(sandbox: Sandbox, tmp_path: Path) -> None:
    wrong = ["cluster.gpu_type=nvidia_geforce_rtx_4090", "cluster.account=sandbx"]
    code, findings = examined(sandbox, tmp_path, *wrong)
    assert code == 1 and levels(findings, "problem") == {"GPUs"}
    assert findings["GPUs"][0]["change"] == "cluster.gpu_type=rtx4090"
    assert findings["account"][0]["change"] == "cluster.account=sandbox"


def badly(conf: str) -> str:
    """slurm.conf with faults that sites have."""
    for good, bad in {
        "KillWait=10": "KillWait=2",
        "JobRequeue=1": "JobRequeue=0\nRequeueExit=1-3\nMaxArraySize=11",
        "MinJobAge=300": "MinJobAge=10",
        "AccountingStorageType=accounting_storage/slurmdbd": "AccountingStorageType=accounting_storage/none",
        "AccountingStorageTRES=gres/gpu,gres/gpu:rtx4090": "",
        "Default=YES MaxTime=INFINITE": "Default=YES MaxTime=00:30:00 DefaultTime=00:10:00",
        "PreemptMode=REQUEUE GraceTime=20": "PreemptMode=CANCEL GraceTime=5",
    }.items():
        assert good in conf
        conf = conf.replace(good, bad)
    return conf


@pytest.fixture(scope="module")
def bad_cluster(slurm_programs: None) -> Iterator[Sandbox]:
    with Sandbox(edit=badly) as cluster:
        cluster.run("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=fan fails, ticket 7")
        yield cluster


def test_planted_faults_of_a_cluster_are_found(bad_cluster: Sandbox, tmp_path: Path) -> None:
    note_save(tmp_path, 15.0)
    code, findings = examined(bad_cluster, tmp_path, "cluster.num_nodes=4", "cluster.time_limit_min=60")
    assert code == 1
    problems, notices = levels(findings, "problem"), levels(findings, "notice")
    assert problems == {"PreemptMode", "GraceTime", "RequeueExit", "time limit", "nodes"}
    assert notices >= {"KillWait", "MaxArraySize", "accounting"}
    assert levels(findings, "ok") >= {"JobRequeue", "GPUs", "partition"}  # jobs ask for --requeue themselves
    assert "5 s (partition train); a save takes 15 s" in findings["GraceTime"][0]["found"]
    assert "GraceTime=60" in findings["GraceTime"][0]["change"]
    assert findings["time limit"][0]["change"].startswith("cluster.time_limit_min=30")
    assert "node2 IDLE+DRAIN (fan fails, ticket 7 [" in findings["nodes"][0]["found"]


def test_of_the_same_faults_those_that_do_not_touch_a_run_are_no_problem(
    bad_cluster: Sandbox, tmp_path: Path
) -> None:
    """The same cluster, for a run that saves in no time and is small and short."""
    note_save(tmp_path, 0.5)
    code, findings = examined(bad_cluster, tmp_path, "cluster.num_nodes=2", "cluster.time_limit_min=20")
    assert code == 1 and levels(findings, "problem") == {"RequeueExit"}
    assert levels(findings, "notice") >= {"nodes", "PreemptMode"}


def test_findings_are_told_with_what_they_mean_and_what_to_do(bad_cluster: Sandbox, tmp_path: Path) -> None:
    done = hpctrain(bad_cluster, tmp_path, "doctor", *RUN, "cluster.time_limit_min=20")
    lines = done.stdout.splitlines()
    (place,) = [n for n, line in enumerate(lines) if line.startswith("✗ RequeueExit: 1-3")]
    assert lines[place + 1].startswith("    means  a run that failed for good (exit code 1, 2, 3)")
    assert lines[place + 2].startswith("    try    ask")
    assert lines[-1].startswith("2 problems")  # CANCEL, and no save was measured yet


def job_that_looks_at_scratch(text: str) -> str:
    found = re.search(r"# question: does node scratch keep its files over a requeue\? Job (\d+)", text)
    assert found
    return found[1]


def test_a_cluster_file_is_written_that_composes(sandbox: Sandbox, tmp_path: Path) -> None:
    done = hpctrain(sandbox, tmp_path, "doctor", "--write-cluster", "mine")
    assert done.returncode == 0, done.stderr
    path = tmp_path / ".config/hpctrain/cluster/mine.yaml"
    text = path.read_text()
    for line in ("gpu_type: rtx4090", "partition: train  # others: urgent", "hardware: rtx4090"):
        assert f"\n{line}\n" in text
    assert "# preemption: REQUEUE, 20 s of grace" in text and "# locked memory" in text
    assert "# question: node0 shows no GPU to a job: nvidia-smi is not installed" in text
    asked = ["+exp=vision_city_laptop", "cluster=mine", "optim.global_batch_size=64"]
    script = hpctrain(sandbox, tmp_path, "render", *asked)
    assert script.returncode == 0, script.stderr
    for option in ("--nodes=4", "--ntasks-per-node=8", "--gres=gpu:rtx4090:8", "--partition=train"):
        assert f"#SBATCH {option}\n" in script.stdout
    job, answer = job_that_looks_at_scratch(text), tmp_path / ".config/hpctrain/cluster/scratch_sandbox.json"
    restarted = f"JobId={job}.*Restarts=1"
    sandbox.wait_for(
        lambda: re.search(restarted, sandbox.run("scontrol", "show", "job", "-o").stdout), 60, "its requeue"
    )
    assert not answer.exists()
    sandbox.speed_up_requeue(job)
    sandbox.wait_for(answer.exists, 60, "its answer")
    done = hpctrain(sandbox, tmp_path, "doctor", *asked, "cluster.device=cpu", "--json")
    findings = {f["topic"]: f for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0, findings
    assert re.fullmatch(r"over a requeue on node\d /tmp kept its files", findings["scratch"]["found"])
    again = hpctrain(sandbox, tmp_path, "doctor", "--write-cluster", "mine")
    assert again.returncode == 2 and "exists" in again.stderr
    assert path.read_text() == text
