"""Ways to start a run on the real cluster: sweeps, sbatch by hand, from inside an allocation, odd values."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.run.directory import RunDirectory
from tests.helpers.runs import FACES, ROOT, SMALL, Cluster, Run, assert_every_step_once, differing_tensors
from tests.slurm.conftest import NUM_STEPS

pytestmark = pytest.mark.slurm
FORTY_STEPS = "optim.num_epochs=4"


def test_a_sweep_is_one_array_whose_points_fail_and_requeue_alone(cluster: Cluster) -> None:
    said = cluster.cli(
        "-m",
        *SMALL,
        f"data.root={cluster.data}",
        "name=grid",
        "optim.lr=2e-3,1e30",  # the second cannot be trained
        "seed=0,1",
        "optim.num_epochs=3",
        "optim.clip_norm=null",
        "budget.crash=0",
        "cluster.num_nodes=1",
        "cluster.exclusive=true",
    ).stdout
    sweep = cluster.folder / "runs" / "grid.sweep"
    points = json.loads((sweep / "sweep.json").read_text())["points"]
    assert set(points) == {"lr=0.002_seed=0", "lr=0.002_seed=1", "lr=1e+30_seed=0", "lr=1e+30_seed=1"}
    runs = {label: Run(cluster, RunDirectory(sweep / label), facts["job"]) for label, facts in points.items()}
    assert len({job.partition("_")[0] for job in (run.job for run in runs.values())}) == 1
    assert f"hpctrain status {sweep}" in said

    victim = runs["lr=0.002_seed=1"]
    victim.wait_for_step(3)
    node = victim.attempts()[0].start["nodes"][0]
    cluster.preempt("--nodes=1", f"--nodelist={node}")
    states = {label: run.wait_until_over() for label, run in runs.items()}
    good, bad = ("lr=0.002_seed=0", "lr=0.002_seed=1"), ("lr=1e+30_seed=0", "lr=1e+30_seed=1")
    assert {label: states[label] for label in good} == dict.fromkeys(good, "COMPLETED")
    assert {label: states[label] for label in bad} == dict.fromkeys(bad, "FAILED")
    assert {runs[label].state() for label in bad} == {"FAILED"}
    starts = {label: len(run.attempts()) for label, run in runs.items()}
    assert starts == {label: 2 if label == "lr=0.002_seed=1" else 1 for label in runs}
    assert_every_step_once(victim.attempts(), 30)
    lines = cluster.cli("status", str(sweep)).stdout.splitlines()
    assert len(lines) == 4 and sum(line.startswith("FAILED") for line in lines) == 2


def test_train_sbatch_runs_frozen_code_in_its_second_start(cluster: Cluster, undisturbed: Run) -> None:
    checkout = cluster.folder / "checkout"
    checkout.mkdir()
    for folder in ("hpctrain", "hydra_plugins", "conf", "sbatch"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    env = {**os.environ, **cluster.sandbox.env, "HPCTRAIN_PYTHON": sys.executable}
    resources = [
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--gres=gpu:rtx4090:1",
        "--signal=USR2@30",
    ]
    overrides = [*SMALL, f"data.root={cluster.data}", "name=by-hand", FORTY_STEPS]
    sent = subprocess.run(
        ["sbatch", "--parsable", *resources, "sbatch/train.sbatch", *overrides],
        cwd=checkout,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    run = Run(cluster, RunDirectory(checkout / "runs" / "by-hand"), sent.stdout.strip())
    run.wait_for_step(5)
    for path in ("hpctrain/core/train.py", "hpctrain/launch/supervise.py", "hpctrain/cli.py"):
        (checkout / path).write_text("raise SystemExit('edited after the start')\n")
    (checkout / "conf" / "exp" / "vision_city_laptop.yaml").write_text("# @package _global_\nseed: 7\n")
    cluster.preempt()
    run.wait(lambda: run.state() == "PENDING", 60, "the preempted run waits again")
    cluster.sandbox.speed_up_requeue(run.job)
    assert run.wait_until_over() == "COMPLETED", (
        run.story() + (checkout / f"hpctrain_{run.job}.log").read_text()
    )
    assert [a.end["cause"] for a in run.attempts() if a.end] == ["preemption", "done"]
    assert_every_step_once(run.attempts(), NUM_STEPS)
    assert differing_tensors(run.final(), undisturbed.final()) == []


def test_a_job_sent_from_inside_another_allocation_is_not_confused_by_it(cluster: Cluster) -> None:
    arguments = [
        *SMALL,
        f"data.root={cluster.data}",
        "name=inner",
        "optim.num_epochs=1",
        "cluster.num_nodes=2",
    ]
    script = cluster.folder / "outer.sh"
    command = " ".join(f"'{word}'" for word in [sys.executable, "-m", "hpctrain", *arguments])
    script.write_text(
        f"#!/bin/bash\ncd {cluster.folder}\nexport MASTER_PORT=1 RANK=3 WORLD_SIZE=9 CUDA_VISIBLE_DEVICES=7\n"
        f"export PYTHONPATH={ROOT}\nsrun -n1 {command}\n"
    )
    outer = cluster.sandbox.sbatch(
        "--nodes=1", "--ntasks=3", "--cpus-per-task=2", "--mem=1000", "--gres=gpu:rtx4090:1",
        "-o", f"{cluster.folder}/outer.log", str(script),
    )  # fmt: skip
    cluster.sandbox.wait_for(lambda: cluster.sandbox.job_state(outer) in ("COMPLETED", "FAILED"), 90)
    said = (cluster.folder / "outer.log").read_text()
    assert "submitted for run inner" in said
    job = said.partition("job ")[2].split()[0]
    run = Run(cluster, RunDirectory(cluster.folder / "runs" / "inner"), job)
    assert run.wait_until_over() == "COMPLETED", run.story()
    (attempt,) = run.attempts()
    assert len(attempt.start["nodes"]) == 2 and attempt.start["num_ranks"] == 2


def test_values_with_shell_characters_reach_slurm_as_they_are(cluster: Cluster) -> None:
    comment = "a 'b' \"c\" $(touch broken) `touch broken`; touch broken # d"
    quoted = comment.replace("\\", "\\\\").replace("'", "\\'")
    run = cluster.submit("odd", "optim.num_epochs=1", f"cluster.comment='{quoted}'", "cluster.mail_type=NONE")
    shown = cluster.sandbox.run("scontrol", "show", "job", run.job).stdout
    assert f"Comment={comment}" in shown
    assert run.wait_until_over() == "COMPLETED", run.story()
    assert not list(Path(cluster.folder).rglob("broken"))


def test_an_unknown_partition_is_refused_by_the_cluster_in_our_form(cluster: Cluster) -> None:
    arguments = [*SMALL, f"data.root={cluster.data}", "name=nowhere", "cluster.partition=nope"]
    refused = cluster.cli(*arguments, check=False)
    assert refused.returncode == 4
    assert "Slurm refused the job" in refused.stderr and "partition" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_render_prints_the_script_that_is_sent(cluster: Cluster) -> None:
    arguments = [*SMALL, f"data.root={cluster.data}", "name=rendered", "optim.num_epochs=1"]
    rendered = cluster.cli("render", *arguments).stdout
    run = cluster.submit("rendered", "optim.num_epochs=1")
    assert run.directory.submit_script.read_text() == rendered
    cluster.sandbox.run("scancel", run.job)


RESOURCES = [
    "--nodes=1",
    "--ntasks-per-node=1",
    "--cpus-per-task=1",
    "--gres=gpu:rtx4090:1",
    "--signal=USR2@30",
]


def test_sbatch_scripts_pack_images_and_send_a_sweep(cluster: Cluster) -> None:
    env = {**os.environ, **cluster.sandbox.env, "HPCTRAIN_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}

    def sbatch(*argv: str) -> str:
        command = ["sbatch", "--parsable", *argv]
        sent = subprocess.run(
            command, cwd=cluster.folder, env=env, capture_output=True, text=True, check=True
        )
        return sent.stdout.strip()

    def wait_for(job: str) -> None:
        over = ("COMPLETED", "FAILED", "CANCELLED")
        cluster.sandbox.wait_for(lambda: cluster.sandbox.job_state(job) in over, 120, f"the end of job {job}")

    shutil.copytree(ROOT / "sbatch", cluster.folder / "sbatch")
    packed = cluster.folder / "packed"
    job = sbatch(
        "--cpus-per-task=1", "sbatch/prepare_data.sbatch", str(FACES), str(packed), "--val-fraction=0.2"
    )
    wait_for(job)
    assert (packed / "train" / "meta.json").exists(), (
        cluster.folder / f"hpctrain_data_{job}.log"
    ).read_text()

    (cluster.folder / "points.txt").write_text("name=a seed=1\nname=b seed=2\n")
    fixed = [*SMALL, f"data.root={packed}", "optim.num_epochs=1", "cluster.num_nodes=1"]
    array = sbatch("--array=1-2", *RESOURCES, "sbatch/sweep.sbatch", "points.txt", *fixed)
    for element in (f"{array}_1", f"{array}_2"):
        wait_for(element)
    for name, seed in (("a", 1), ("b", 2)):
        run = Run(cluster, RunDirectory(cluster.folder / "runs" / name), array)
        assert run.status()["state"] == "COMPLETED", run.story()
        assert f"seed: {seed}" in run.directory.config.read_text()
