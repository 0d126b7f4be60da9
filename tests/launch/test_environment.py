"""What the environment says of ranks and allocations, and what of it must not be inherited."""

from __future__ import annotations

import pytest

from hpctrain.launch.environment import allocation, rank_environment, rank_facts, scrubbed


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_RESTART_COUNT", "SLURMD_NODENAME",
        "SBATCH_PARTITION", "SRUN_DEBUG", "PMI_RANK", "PMIX_NAMESPACE", "SUBMITIT_EXECUTOR", "MASTER_ADDR",
        "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK",
        "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES", "HPCTRAIN_RANK", "HPCTRAIN_RANK_WORLD",
    ],
)  # fmt: skip
def test_what_an_outer_job_left_is_scrubbed(name: str) -> None:
    assert scrubbed({name: "1", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("name", ["SLURM_CONF", "PATH", "HOME", "NCCL_DEBUG", "RANKING", "MY_SLURM_JOB_ID"])
def test_the_rest_is_kept(name: str) -> None:
    assert scrubbed({name: "1"}) == {name: "1"}


def test_without_slurm_there_is_no_allocation() -> None:
    here = allocation({"PATH": "/bin"})
    assert (here.job, here.restart, here.nodelist, here.is_slurm) == (None, 0, None, False)


def test_a_job_is_named_by_its_number() -> None:
    here = allocation({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "3", "SLURM_JOB_NODELIST": "n[0-1]"})
    assert (here.job, here.restart, here.nodelist, here.is_slurm) == ("12", 3, "n[0-1]", True)


def test_an_array_element_is_named_by_array_and_task_even_where_both_numbers_agree() -> None:
    """The last element has the array's own number: requeueing that would requeue every element."""
    environment = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert allocation(environment).job == "12_3"
    assert allocation({**environment, "SLURM_JOB_ID": "14"}).job == "12_3"


MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "12345"}


def test_a_rank_knows_itself_from_srun() -> None:
    facts = rank_facts({**MASTER, "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8"})
    assert (facts.rank, facts.local_rank, facts.world_size) == (5, 1, 8)
    assert (facts.master_addr, facts.master_port) == ("10.0.0.1", 12345)


def test_our_own_variables_win_over_those_of_an_allocation_around_us() -> None:
    outer = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    facts = rank_facts({**outer, **MASTER, **rank_environment(rank=3, local_rank=3, world_size=4)})
    assert (facts.rank, facts.local_rank, facts.world_size) == (3, 3, 4)
