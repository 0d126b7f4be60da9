"""Rank and allocation facts from the environment. Nobody else reads `os.environ` for them."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Inherited from an allocation or a launcher around us, these would mislead sbatch, srun or the ranks.
_FOREIGN = re.compile(
    r"(SLURM|SBATCH|SRUN|SLURMD|PMI|PMIX|SUBMITIT|MASTER|GROUP|TORCHELASTIC|HPCTRAIN_RANK)(_|$).*"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES"
)
_KEPT = {"SLURM_CONF"}


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an outer allocation or launcher left in it."""
    return {k: v for k, v in environment.items() if k in _KEPT or not _FOREIGN.fullmatch(k)}


@dataclass(frozen=True)
class Allocation:
    """What Slurm gave the supervisor, or this machine if there is no Slurm around it."""

    job: str | None  #: what scontrol and scancel understand: `12`, or `12_3` for an array element
    restart: int
    nodelist: str | None

    @property
    def is_slurm(self) -> bool:
        return self.job is not None


def allocation(environment: Mapping[str, str] = os.environ) -> Allocation:
    """The allocation this process runs in."""
    job = environment.get("SLURM_JOB_ID")
    # The last element of an array has the array's own job id: requeueing that requeues the whole array.
    if job and "SLURM_ARRAY_JOB_ID" in environment:
        job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return Allocation(
        job=job,
        restart=int(environment.get("SLURM_RESTART_COUNT", 0)),
        nodelist=environment.get("SLURM_JOB_NODELIST"),
    )


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """What Slurm calls this node, where it has started us; else the host's own name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def submit_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where sbatch was called."""
    return Path(environment.get("SLURM_SUBMIT_DIR", "."))


@dataclass(frozen=True)
class RankFacts:
    """Who a rank is among the ranks of its attempt."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int
    is_child: bool  #: started by the supervisor itself, without Slurm


def rank_environment(rank: int, local_rank: int, world_size: int) -> dict[str, str]:
    """Rank facts for a rank that Slurm did not start."""
    return {
        "HPCTRAIN_RANK": str(rank),
        "HPCTRAIN_RANK_LOCAL": str(local_rank),
        "HPCTRAIN_RANK_WORLD": str(world_size),
    }


def rank_facts(environment: Mapping[str, str] = os.environ) -> RankFacts:
    """Who this process is: from our own variables, else from srun's."""
    names = ("HPCTRAIN_RANK", "HPCTRAIN_RANK_LOCAL", "HPCTRAIN_RANK_WORLD")
    is_child = names[0] in environment
    if not is_child:
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    rank, local_rank, world_size = (int(environment[name]) for name in names)
    return RankFacts(
        rank, local_rank, world_size, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_child
    )
