"""The stop contract on the real cluster: preempted, timed out, cancelled, killed, stopped, finished."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from hpctrain.checkpoint import store
from hpctrain.run.ledger import Ledger
from tests.helpers.runs import Cluster, Run, assert_every_step_once, differing_tensors
from tests.slurm.conftest import NUM_STEPS

pytestmark = pytest.mark.slurm
FORTY_STEPS = "optim.num_epochs=4"


def rank_pids(run: Run) -> dict[int, int]:
    """Process of each rank of the attempt that is running, found by its command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                environment = (entry / "environ").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if b"hpctrain.launch.rank" in command and str(run.directory.path).encode() in command:
                is_srun = command[0].endswith(b"srun")
                parents_command = Path(f"/proc/{parent}/cmdline").read_bytes()
                is_worker = b"hpctrain.launch.rank" in parents_command and b"srun" not in parents_command
                rank = [v for v in environment if v.startswith(b"SLURM_PROCID=")]
                if rank and not is_srun and not is_worker:
                    found[int(rank[0].partition(b"=")[2])] = int(entry.name)
    return found


PACED = """
import sys
if "hpctrain.launch.rank" in " ".join(sys.orig_argv):
    import time
    from hpctrain.core import step
    original = step.TrainStep.__call__
    def paced(self, microbatches, number):
        time.sleep({seconds})
        return original(self, microbatches, number)
    step.TrainStep.__call__ = paced
"""


def paced(cluster: Cluster, seconds: float) -> str:
    """Override that makes each step last at least so long, so that a quick machine is interrupted too."""
    (cluster.folder / "sitecustomize.py").write_text(PACED.format(seconds=seconds))
    return f'cluster.setup=["export PYTHONPATH={cluster.folder}"]'


@pytest.mark.long  # a preempted run of test_callbot, and one at its time limit below, are held to the same
def test_a_run_preempted_twice_equals_the_undisturbed_one_bit_for_bit(cluster: Cluster) -> None:
    undisturbed = cluster.submit("undisturbed", FORTY_STEPS, "cluster.ranks_per_node=2")
    assert undisturbed.wait_until_over() == "COMPLETED", undisturbed.story()
    slowed = paced(cluster, 0.1)
    run = cluster.submit("preempted", FORTY_STEPS, "cluster.ranks_per_node=2", slowed)
    for step in (8, 20):
        run.wait_for_step(step)
        told = time.time()
        urgent = cluster.preempt()
        run.wait(lambda: run.state() == "PENDING", 60, "the preempted run waits again")
        saved = Ledger(run.directory.ledger).last("saved")
        assert saved is not None and saved["time"] - told < 20, f"not saved within the grace\n{run.story()}"
        cluster.sandbox.wait_for(lambda: cluster.sandbox.job_state(urgent) == "COMPLETED", 60)  # noqa: B023
        cluster.sandbox.speed_up_requeue(run.job)
    assert run.wait_until_over() == "COMPLETED", run.story()
    attempts = run.attempts()
    assert [a.end["cause"] for a in attempts if a.end] == ["preemption", "preemption", "done"]
    assert all(a.restored_step for a in attempts[1:])
    assert_every_step_once(attempts, NUM_STEPS)
    assert run.steps() == list(range(1, NUM_STEPS + 1))
    assert run.samples_hash() == undisturbed.samples_hash()
    assert differing_tensors(run.final(), undisturbed.final()) == []


def test_the_time_limit_ends_a_start_and_not_the_run(cluster: Cluster, undisturbed: Run) -> None:
    run = cluster.submit(
        "limited",
        FORTY_STEPS,
        "cluster.time_limit_min=1",
        "cluster.signal_lead_s=30",
        # No machine does 40 of these steps before the warning, 30 s after the start; two starts do on any.
        paced(cluster, 0.8),
    )
    assert run.wait_until_over(300) == "COMPLETED", run.story()
    causes = [a.end["cause"] for a in run.attempts() if a.end]
    assert len(causes) > 1 and causes[-1] == "done" and set(causes[:-1]) == {"time_limit"}, run.story()
    assert_every_step_once(run.attempts(), NUM_STEPS)
    assert differing_tensors(run.final(), undisturbed.final()) == []


SLOW_COMMIT = """
import sys
if "hpctrain.launch.rank" in " ".join(sys.orig_argv):
    import pathlib, time
    from hpctrain.checkpoint import store
    commit = store.commit
    def slow(*args):
        pathlib.Path(__file__).with_name("committing").touch()
        time.sleep(2)
        return commit(*args)
    store.commit = slow
"""


@pytest.mark.parametrize("moment", ["step", "save"])
def test_a_cancelled_run_saves_and_stays_cancelled_until_it_is_resumed(
    cluster: Cluster, undisturbed: Run, moment: str
) -> None:
    every = "checkpoint.every_steps=6" if moment == "save" else "checkpoint.every_steps=0"
    (cluster.folder / "sitecustomize.py").write_text(SLOW_COMMIT if moment == "save" else "")
    slowed = f'cluster.setup=["export PYTHONPATH={cluster.folder}"]'
    run = cluster.submit("cancelled", FORTY_STEPS, every, slowed)
    run.wait_for_step(6)
    if moment == "save":
        run.wait((cluster.folder / "committing").exists, 60, "a save under way")
    cluster.sandbox.run("scancel", run.job)
    run.wait(lambda: run.state() == "CANCELLED", 30, "CANCELLED")
    run.wait(lambda: not rank_pids(run) and not run.directory.is_locked(), 30, "all processes gone")
    (attempt,) = run.attempts()
    assert attempt.end is not None and attempt.end["decision"] == "stop", run.story()
    assert attempt.saved_step and attempt.saved_step >= 6
    sound = store.find(run.directory.checkpoints)
    assert sound and not any(store.verify(checkpoint.path) for checkpoint in sound)
    assert run.status()["state"] == "CANCELLED"
    # Requeues start within 11 s on this cluster: one that had slipped through would show by now.
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        assert run.state() == "CANCELLED"
        time.sleep(0.5)
    if moment == "step":
        resumed = cluster.cli("resume", str(run.directory.path), "--json").stdout
        run.job = json.loads(resumed.splitlines()[-1])["job"]
        assert run.wait_until_over() == "COMPLETED", run.story()
        assert_every_step_once(run.attempts(), NUM_STEPS)
        assert differing_tensors(run.final(), undisturbed.final()) == []


def test_a_cancelled_run_that_waits_in_the_queue_stays_cancelled(cluster: Cluster) -> None:
    run = cluster.submit("queued", FORTY_STEPS, "+cluster.extra_sbatch.begin=now+60")
    assert run.state() == "PENDING"
    said = cluster.cli("cancel", str(run.directory.path)).stdout
    assert "cancelled" in said
    assert run.state() == "CANCELLED"
    assert run.status()["state"] == "CANCELLED"


def test_ranks_that_outlive_a_killed_one_publish_nothing_and_the_run_goes_on_in_its_allocation(
    cluster: Cluster, undisturbed: Run
) -> None:
    run = cluster.submit("killed", FORTY_STEPS, "checkpoint.every_steps=5", paced(cluster, 0.1))
    run.wait_for_step(12)
    os.kill(rank_pids(run)[1], signal.SIGKILL)
    assert run.wait_until_over() == "COMPLETED", run.story()
    first, second = run.attempts()
    assert first.end is not None and first.end["cause"] == "killed" and first.end["rank"] == 1, run.story()
    assert first.end["decision"] == "relaunch"
    assert first.name.split("_")[:2] == second.name.split("_")[:2], "not in the same allocation"
    assert first.saved_step is not None and first.saved_step % 5 == 0
    assert second.restored_step == first.saved_step
    assert differing_tensors(run.final(), undisturbed.final()) == []


def test_a_rank_that_stands_still_is_found_and_the_run_goes_on(cluster: Cluster, undisturbed: Run) -> None:
    run = cluster.submit("hung", FORTY_STEPS, "checkpoint.every_steps=5", "hang_timeout_s=12")
    run.wait_for_step(8)
    os.kill(rank_pids(run)[1], signal.SIGSTOP)
    assert run.wait_until_over() == "COMPLETED", run.story()
    first, second = run.attempts()
    assert first.end is not None and (first.end["cause"], first.end["decision"]) == ("hang", "relaunch")
    assert second.restored_step == first.saved_step == 5
    assert differing_tensors(run.final(), undisturbed.final()) == []


FAULT = """
import sys
if "hpctrain.launch.rank" in " ".join(sys.orig_argv):
    from hpctrain.core import step
    original = step.TrainStep.__call__
    def failing(self, microbatches, number):
        if number == 6:
            raise ValueError("a bug that comes at step 6")
        return original(self, microbatches, number)
    step.TrainStep.__call__ = failing
"""


def test_a_run_that_crashes_at_the_same_step_ends_after_its_budget_and_says_why(cluster: Cluster) -> None:
    (cluster.folder / "sitecustomize.py").write_text(FAULT)
    run = cluster.submit(
        "crashing",
        FORTY_STEPS,
        "budget.crash=1",
        "checkpoint.every_steps=4",
        f'cluster.setup=["export PYTHONPATH={cluster.folder}"]',
        "cluster.num_nodes=1",
    )
    assert run.wait_until_over() == "FAILED", run.story()
    assert run.state() == "FAILED"
    assert [a.end["cause"] for a in run.attempts() if a.end] == ["crash", "crash"]
    assert [a.restored_step for a in run.attempts()] == [0, 4]
    status = run.status()
    assert "a bug that comes at step 6" in status["cause"]
    assert "budget.crash" in status["reason"]


def test_touching_stop_saves_and_ends_the_run_and_done_makes_another_start_harmless(
    cluster: Cluster, undisturbed: Run
) -> None:
    run = cluster.submit("stopped", FORTY_STEPS, paced(cluster, 0.1))
    run.wait_for_step(4)
    run.directory.stop.touch()
    assert run.wait_until_over() == "STOPPED", run.story()
    assert run.state() == "COMPLETED"
    stopped_at = run.attempts()[-1].saved_step
    assert stopped_at and stopped_at < NUM_STEPS
    run.job = json.loads(cluster.cli("resume", str(run.directory.path), "--json").stdout.splitlines()[-1])[
        "job"
    ]
    assert run.wait_until_over() == "COMPLETED", run.story()
    assert differing_tensors(run.final(), undisturbed.final()) == []
    events = len(run.attempts())
    cluster.sandbox.run("scontrol", "requeue", run.job)
    run.wait(lambda: run.state() != "COMPLETED", 30, "the spurious requeue")
    assert run.wait_until_over() == "COMPLETED", run.story()
    assert len(run.attempts()) == events, "a finished run was started again"


def test_a_second_live_job_in_one_folder_is_refused(cluster: Cluster) -> None:
    run = cluster.submit("once", FORTY_STEPS, "+cluster.extra_sbatch.begin=now+60")
    with pytest.raises(AssertionError, match="exited with 2") as refusal:
        cluster.submit("once", FORTY_STEPS)
    assert f"job {run.job}" in str(refusal.value)


MUTATIONS = {
    "restarts from step 0": """
import sys
if "hpctrain.launch.rank" in " ".join(sys.orig_argv):
    from hpctrain.checkpoint import reader
    reader.load = lambda *args, **kwargs: None
""",
    "repeats a batch": """
import sys
if "hpctrain.launch.rank" in " ".join(sys.orig_argv):
    from hpctrain.data import source
    original = source.build_train_loader
    def one_behind(*args, **kwargs):
        consumed = kwargs["samples_consumed"]
        last = 32 if consumed % 300 else 12  # of the last step of an epoch
        return original(*args, **{**kwargs, "samples_consumed": max(0, consumed - last)})
    source.build_train_loader = one_behind
""",
}


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(mutation, marks=pytest.mark.long)
        for mutation in ("restarts from step 0", "repeats a batch")
    ],
)
def test_the_comparison_notices_a_run_that(cluster: Cluster, undisturbed: Run, mutation: str) -> None:
    (cluster.folder / "sitecustomize.py").write_text(MUTATIONS[mutation])
    run = cluster.submit("mutant", FORTY_STEPS, f'cluster.setup=["export PYTHONPATH={cluster.folder}"]')
    run.wait_for_step(5)
    cluster.preempt()
    run.wait(lambda: run.state() == "PENDING", 60, "the preempted run waits again")
    cluster.sandbox.speed_up_requeue(run.job)
    assert run.wait_until_over() == "COMPLETED", run.story()
    if mutation == "restarts from step 0":
        with pytest.raises(AssertionError, match=r"began at (None|0),"):
            assert_every_step_once(run.attempts(), NUM_STEPS)
    else:
        assert_every_step_once(run.attempts(), NUM_STEPS)  # the steps look right; the samples do not
        assert run.samples_hash() != undisturbed.samples_hash()
        assert differing_tensors(run.final(), undisturbed.final()) != []


@pytest.mark.long  # once in four runs the sandbox did not start the requeued job within three minutes
def test_a_lost_node_costs_the_steps_since_the_last_checkpoint_and_nothing_else(
    cluster: Cluster, undisturbed: Run
) -> None:
    run = cluster.submit("node-lost", FORTY_STEPS, "checkpoint.every_steps=5", paced(cluster, 0.1))
    run.wait_for_step(8)
    lost = run.attempts()[0].start["nodes"][0]  # the head node: its supervisor is lost with it
    cluster.sandbox.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
    run.wait(lambda: run.state() == "PENDING", 60, "the job waits again")
    assert run.wait_until_over() == "COMPLETED", run.story()
    first, *_, last = run.attempts()
    assert first.end is not None and first.end["cause"] in ("lost", "preemption", "node_failure")
    assert last.restored_step == first.saved_step
    assert differing_tensors(run.final(), undisturbed.final()) == []
