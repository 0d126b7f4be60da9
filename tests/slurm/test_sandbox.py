import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import find_processes, is_running, kill
from tests.helpers.sandbox import MARK, Sandbox, stop_dead_sandboxes

pytestmark = pytest.mark.slurm

CATCH_SIGNALS = """
import os, signal, sys, time
def note(number, frame):
    with open(f"{sys.argv[1]}/{os.environ['SLURM_PROCID']}", "a") as file:
        file.write(f"{number}\\n")
signal.signal(signal.SIGTERM, note)
open(f"{sys.argv[1]}/{os.environ['SLURM_PROCID']}", "w").close()
while True:
    time.sleep(0.1)
"""


def test_steps_on_two_nodes_see_their_typed_gpus(sandbox: Sandbox) -> None:
    step = ["srun", "-N2", "--ntasks-per-node=2", "--gres=gpu:rtx4090:2", "--cpus-per-task=2"]
    lines = sandbox.run(*step, "sh", "-c", "echo $SLURMD_NODENAME $SLURM_LOCALID $CUDA_VISIBLE_DEVICES")
    assert sorted(lines.stdout.splitlines()) == ["node0 0 0,1", "node0 1 0,1", "node1 0 0,1", "node1 1 0,1"]


def test_more_gpus_than_a_node_has_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(RuntimeError, match="Requested node configuration is not available"):
        sandbox.sbatch("-N1", "--gres=gpu:rtx4090:9", "--wrap", "true")


@pytest.mark.long  # how the sandbox behaves; the stop contract's own tests would notice a change
def test_an_urgent_job_preempts_with_sigterm_to_the_steps_and_the_job_comes_back(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    (tmp_path / "step.py").write_text(CATCH_SIGNALS)
    step = f"srun {sys.executable} {tmp_path}/step.py {tmp_path}"
    log = f"--output={tmp_path}/%j.log"
    job = sandbox.sbatch("-N4", "--ntasks-per-node=1", "--exclusive", "--requeue", log, "--wrap", step)
    sandbox.wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(4)), what="all ranks run")
    urgent = sandbox.sbatch("-p", "urgent", "-N4", "--exclusive", log, "--wrap", "true")
    sandbox.wait_for(
        lambda: [(tmp_path / str(rank)).read_text().split() for rank in range(4)] == [["15"]] * 4,
        15,
        "SIGTERM reached every rank once",
    )
    # The ranks do not end by themselves: the grace of 20 s and KillWait pass.
    sandbox.wait_for(lambda: sandbox.job_state(job) == "PENDING", what="the preempted job waits again")
    sandbox.wait_for(lambda: sandbox.job_state(urgent) == "COMPLETED", what="the urgent job is done")
    sandbox.speed_up_requeue(job)
    sandbox.wait_for(lambda: sandbox.job_state(job) == "RUNNING", 30, "the preempted job runs again")
    sacct = ["sacct", "-D", "-X", "-n", "-P", "-o", "State", "-j", job]
    sandbox.wait_for(lambda: sandbox.run(*sacct).stdout.split() == ["PREEMPTED", "RUNNING"])


def test_a_lost_node_is_noticed_and_can_come_back(sandbox: Sandbox) -> None:
    job = sandbox.sbatch("-w", "node2", "--requeue", "--output=/dev/null", "--wrap", "srun sleep 600")
    on_node = {"SLURM_CONF": str(sandbox.conf), "SLURMD_NODENAME": "node2"}
    tasks = sandbox.wait_for(lambda: find_processes(lambda env: on_node.items() <= env.items()))
    sandbox.kill_node(2)
    assert not any(is_running(pid) for pid in tasks)
    sandbox.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    sandbox.wait_for(lambda: sandbox.job_state(job) == "PENDING", what="the job of the lost node waits again")
    sandbox.start_node(2)
    sandbox.run("scontrol", "update", "NodeName=node2", "State=RESUME")
    sandbox.speed_up_requeue(job)
    sandbox.wait_for(lambda: sandbox.job_state(job) == "RUNNING", what="the job runs on its node again")


def test_a_sandbox_whose_daemons_and_owner_died_is_cleaned_by_the_next_start(slurm_programs: None) -> None:
    program = """if True:
        import os
        from tests.helpers.sandbox import Sandbox
        sandbox = Sandbox()
        sandbox.start()
        print(sandbox.folder, flush=True)
        os.kill(os.getpid(), 9)
    """
    owner = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert owner.returncode == -signal.SIGKILL, owner.stderr
    folder = Path(owner.stdout.strip())
    left = find_processes(lambda env: env.get(MARK) == str(folder))
    some = {pid for pid in left if "slurmctld" in Path(f"/proc/{pid}/cmdline").read_text()}
    assert some and some < left
    kill(some)
    stop_dead_sandboxes()  # the first thing that start() does
    assert not folder.exists() and not any(is_running(pid) for pid in left)


def test_a_persons_sandbox_runs_beside_others_and_is_replaced_when_it_has_died(sandbox: Sandbox) -> None:
    other = Sandbox(Path(f"/tmp/hpctrain-test-{os.getpid()}"))

    def command(verb: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "tests.helpers.sandbox", verb, str(other.folder)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=120)

    def processes() -> set[int]:
        return find_processes(lambda env: env.get("SLURM_CONF") == str(other.conf))

    try:
        assert command("start").stdout == f"export SLURM_CONF={other.conf}\n"
        daemons = processes()
        assert command("start").returncode == 0 and processes() == daemons  # it runs already
        assert "node[0-3]" in command("status").stdout

        kill({pid for pid in daemons if "mariadbd" not in Path(f"/proc/{pid}/cmdline").read_text()})
        assert command("status").returncode == 1
        assert command("start").returncode == 0 and command("status").returncode == 0
        assert not any(is_running(pid) for pid in daemons)

        job = other.sbatch("--output=/dev/null", "--wrap", "srun sleep 600")
        other.wait_for(lambda: other.job_state(job) == "RUNNING")
        assert sandbox.run("squeue", "-h").stdout == ""
        assert len(processes()) > len(daemons)
    finally:
        assert command("stop").returncode == 0
    assert not other.folder.exists() and not processes()
    assert sandbox.is_up


def test_a_folder_that_is_not_a_sandbox_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="not a sandbox"):
        Sandbox(tmp_path).stop()
    assert (tmp_path / "thesis.tex").exists()
