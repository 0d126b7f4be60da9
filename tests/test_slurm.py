import signal
import subprocess
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest

from hpctrain import slurm
from hpctrain.errors import ClusterError
from tests.helpers.sandbox import Sandbox


def test_a_missing_program_points_to_local_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"(?s)squeue is not on PATH.*cluster=local"):
        slurm.queue()


@pytest.fixture
def cluster(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    monkeypatch.setenv("SLURM_CONF", str(sandbox.conf))
    monkeypatch.setenv("SQUEUE_FORMAT", "%u")  # a user's taste must not matter
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    return sandbox


@pytest.mark.slurm
def test_a_job_is_followed_from_the_queue_to_the_books(cluster: Sandbox, tmp_path: Path) -> None:
    start_s = datetime.now().timestamp()
    job_id = cluster.sbatch(
        "-N2", "--time=5", "--job-name=a b", f"--chdir={tmp_path}", "-o", "/dev/null", "--wrap", "sleep 600"
    )
    cluster.wait_for(lambda: cluster.job_state(job_id) == "RUNNING")
    job = slurm.job(job_id)
    assert job and slurm.is_alive(job_id)
    assert (job.name, job.state, job.nodes, job.batch_host) == ("a b", "RUNNING", "node[0-1]", "node0")
    assert (job.time_limit_s, job.work_dir) == (300, str(tmp_path))
    assert job.end_time_s and 290 < job.end_time_s - start_s < 330
    (entry,) = slurm.queue([job_id])
    assert (entry.job_id, entry.state, entry.name) == (job_id, "RUNNING", "a b")

    slurm.cancel(job_id)
    cluster.wait_for(lambda: not slurm.is_alive(job_id))
    job = slurm.job(job_id)
    assert job and job.state == "CANCELLED" and job.was_ended(restarts=0)
    assert slurm.queue([job_id]) == []
    states = cluster.wait_for(lambda: [r.state for r in slurm.accounting(job_id) or []])
    assert states == ["CANCELLED"]


@pytest.mark.slurm
def test_an_element_of_an_array_is_requeued_alone(cluster: Sandbox) -> None:
    array = cluster.sbatch("--array=0-1", "-o", "/dev/null", "--wrap", "exec sleep 600")
    cluster.wait_for(lambda: [entry.state for entry in slurm.queue([array])] == ["RUNNING"] * 2)
    slurm.requeue(f"{array}_1")
    cluster.wait_for(lambda: (job := slurm.job(f"{array}_1")) and job.state == "PENDING")
    slurm.requeue(f"{array}_1")  # the same again is no error
    requeued, other = slurm.job(f"{array}_1"), slurm.job(f"{array}_0")
    assert requeued and other and (requeued.restarts, other.restarts) == (1, 0)
    assert not requeued.was_ended(restarts=0) and other.state == "RUNNING"
    slurm.update(f"{array}_1", TimeLimit="7")
    changed = slurm.job(f"{array}_1")
    assert changed and changed.time_limit_s == 420


@pytest.mark.slurm
def test_the_cluster_describes_itself(cluster: Sandbox) -> None:
    assert slurm.version() >= (22, 5)
    assert slurm.expand("node[0-2],login") == ["node0", "node1", "node2", "login"]
    assert [(n.name, n.address, n.gres, n.num_cpus) for n in slurm.nodes("node[2-3]")] == [
        ("node2", "127.0.0.1", "gpu:rtx4090:8", 8),
        ("node3", "127.0.0.1", "gpu:rtx4090:8", 8),
    ]
    train, urgent = slurm.partitions()
    assert (train.name, train.grace_time_s, train.preempt_mode) == ("train", 20, "REQUEUE")
    assert (urgent.name, urgent.is_default, urgent.preempt_mode) == ("urgent", False, "OFF")


@pytest.mark.slurm
def test_what_the_cluster_does_not_know_is_none_or_an_error(
    cluster: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert slurm.job("99999") is None and not slurm.is_alive("99999")
    assert slurm.queue(["99999"]) == [] and slurm.accounting("99999") == []
    slurm.cancel("99999")
    with pytest.raises(ClusterError, match=r"(?s)requeue job 99999.*Invalid job id"):
        slurm.requeue("99999")
    with pytest.raises(ClusterError, match="node9 not found"):
        slurm.nodes("node9")
    lines = cluster.conf.read_text().splitlines(keepends=True)
    bare = tmp_path / "slurm.conf"
    bare.write_text("".join(line for line in lines if not line.startswith("AccountingStorage")))
    monkeypatch.setenv("SLURM_CONF", str(bare))
    assert slurm.accounting("1") is None


@pytest.fixture
def hasty_conf(cluster: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cluster's configuration for clients that wait 2 s for an answer, not 10."""
    conf = tmp_path / "slurm.conf"
    conf.write_text(f"{cluster.conf.read_text()}MessageTimeout=2\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    return conf


@pytest.mark.slurm
def test_a_busy_controller_is_asked_again(cluster: Sandbox, hasty_conf: Path) -> None:
    controller = cluster.daemons["slurmctld"]
    controller.send_signal(signal.SIGSTOP)
    try:
        first = subprocess.run(["squeue"], capture_output=True, text=True)
        assert first.returncode and "Socket timed out" in first.stderr
        wakes = threading.Timer(3, controller.send_signal, [signal.SIGCONT])
        wakes.start()
        assert slurm.queue() == []
        wakes.join()
    finally:
        controller.send_signal(signal.SIGCONT)


@pytest.mark.slurm
def test_a_controller_that_is_away_is_given_up_in_bounded_time(cluster: Sandbox, hasty_conf: Path) -> None:
    hasty_conf.write_text(hasty_conf.read_text().replace("SlurmctldPort=", "SlurmctldPort=9\n#"))
    start_s = time.monotonic()
    with pytest.raises(ClusterError, match="Unable to contact slurm controller"):
        slurm.run(["squeue"], patience_s=5)
    assert time.monotonic() - start_s < 25
