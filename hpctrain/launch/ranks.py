"""Starting one process per rank: with srun in an allocation, as plain processes without Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from hpctrain import slurm
from hpctrain.config.schema import ClusterConfig, Config, Device, GpuRequest
from hpctrain.errors import ClusterError
from hpctrain.launch import network
from hpctrain.launch.environment import allocation, rank_environment, scrubbed
from hpctrain.launch.snapshot import current_code
from hpctrain.plan.plan import RunPlan
from hpctrain.run.directory import RunDirectory

PEERS_LEAVE_S = 60  # how long the other ranks may go on after one has ended
STEP_START_S = 600  # how long srun may wait for the resources of our own allocation

Ask = Callable[[Callable[[], Any]], Any]  # asks Slurm, patiently


def gpu_option(cluster: ClusterConfig) -> list[str]:
    """The one way in which this cluster is asked for GPUs, for sbatch and srun alike."""
    if cluster.gpu_request is GpuRequest.none:
        return []
    prefix = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
    if cluster.gpu_request is GpuRequest.gres:
        return [f"--gres=gpu:{prefix}{cluster.ranks_per_node}"]
    return [f"--gpus-per-node={prefix}{cluster.ranks_per_node}"]


class _Ranks:
    """What both ways of starting ranks share."""

    nodes: list[str]

    def __init__(self, run: RunDirectory, config: Config, plan: RunPlan, attempt: str, ask: Ask) -> None:
        self.run, self.config, self.plan, self.attempt, self.ask = run, config, plan, attempt, ask
        self.code = current_code(run.code)

    def command(self) -> list[str]:
        return [sys.executable, "-u", "-m", "hpctrain.launch.rank", str(self.run.path), self.attempt]

    def environment(self, address: str) -> dict[str, str]:
        """What ranks need beyond what they inherit."""
        cluster = self.config.cluster
        path = os.pathsep.join(filter(None, [str(self.code), os.environ.get("PYTHONPATH", "")]))
        chosen = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(network.free_port()),
            "PYTHONPATH": path,
            "PYTHONSAFEPATH": "1",  # the folder we stand in must not shadow the frozen code
            "OMP_NUM_THREADS": str(cluster.cpus_per_rank),
        }
        if cluster.device is Device.cuda:
            chosen["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # numbers as in nvidia-smi and cluster.pcie_roots
        if self.config.deterministic:
            chosen["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with it
        if cluster.network_interface:
            chosen["NCCL_SOCKET_IFNAME"] = chosen["GLOO_SOCKET_IFNAME"] = cluster.network_interface
        return {**chosen, **cluster.env}


class SlurmRanks(_Ranks):
    """One rank per GPU through srun, inside the allocation we run in."""

    def __init__(self, run: RunDirectory, config: Config, plan: RunPlan, attempt: str, ask: Ask) -> None:
        super().__init__(run, config, plan, attempt, ask)
        nodelist = allocation().nodelist
        assert nodelist is not None
        self.node_infos = ask(lambda: slurm.nodes(nodelist))
        self.nodes = [node.name for node in self.node_infos]

    def start(self) -> None:
        cluster = self.config.cluster
        log = self.run.logs / f"{self.attempt}_%t.log"
        command = [
            "srun",
            f"--nodes={self.plan.num_nodes}",
            f"--ntasks={self.plan.world_size}",
            f"--ntasks-per-node={self.plan.ranks_per_node}",
            f"--cpus-per-task={cluster.cpus_per_rank}",  # 22.05 does not inherit it
            *gpu_option(cluster),
            "--cpu-bind=none",  # ranks bind themselves; SLURM_CPU_BIND of an outer step would bind them all
            "--distribution=block",
            "--kill-on-bad-exit=1",
            f"--wait={PEERS_LEAVE_S}",
            f"--immediate={STEP_START_S}",
            "--unbuffered",
            "--export=ALL",
            "--open-mode=append",
            f"--output={log}",
            *cluster.extra_srun,
            *self.command(),
        ]
        address = network.head_address(self.node_infos)
        self.process = subprocess.Popen(command, env={**os.environ, **self.environment(address)})

    def poll(self) -> int | None:
        return self.process.poll()

    def signal(self, number: int) -> None:
        """Slurm signals the steps of a job itself."""

    def kill(self) -> None:
        self.process.kill()

    def lost_nodes(self) -> list[str]:
        """Nodes of the allocation that Slurm no longer counts on."""
        bad = ("DOWN", "NOT_RESPONDING", "FAIL", "*")
        try:
            nodes = self.ask(lambda: slurm.nodes(",".join(self.nodes)))
        except ClusterError:
            return []
        return [node.name for node in nodes if any(word in node.state for word in bad)]


class LocalRanks(_Ranks):
    """Ranks as processes of this machine. Rank 0 shares our terminal; the others write log files."""

    def __init__(self, run: RunDirectory, config: Config, plan: RunPlan, attempt: str, ask: Ask) -> None:
        super().__init__(run, config, plan, attempt, ask)
        self.nodes = ["localhost"]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.first_end: float | None = None
        self.signalled = False

    def start(self) -> None:
        shared = {**scrubbed(os.environ), **self.environment("127.0.0.1")}
        shared.setdefault("GLOO_SOCKET_IFNAME", "lo")
        for rank in range(self.plan.world_size):
            environment = {**shared, **rank_environment(rank, rank, self.plan.world_size)}
            if self.config.cluster.device is Device.cuda and "CUDA_VISIBLE_DEVICES" in os.environ:
                environment["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
            log = self._open_log(rank) if rank else None
            # Own session: Ctrl-C reaches the supervisor alone, which tells the ranks.
            process = subprocess.Popen(
                self.command(), env=environment, stdout=log, stderr=log, start_new_session=True
            )
            if log:
                log.close()
            self.processes.append(process)

    def _open_log(self, rank: int) -> BinaryIO:
        return (self.run.logs / f"{self.attempt}_{rank}.log").open("ab")

    def poll(self) -> int | None:
        """The worst exit code once all have ended. Ranks that outlive a dead one for too long are killed."""
        codes = [process.poll() for process in self.processes]
        if None not in codes:
            return max(abs(code) for code in codes if code is not None)
        if any(code is not None for code in codes):
            self.first_end = self.first_end or time.monotonic()
            if time.monotonic() - self.first_end > PEERS_LEAVE_S:
                self.kill()
        return None

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def signal(self, number: int) -> None:
        if not self.signalled:
            self.signalled = True
            for process in self.processes:
                process.send_signal(signal.Signals(number))

    def lost_nodes(self) -> list[str]:
        return []
