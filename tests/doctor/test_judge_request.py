from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpctrain.config.schema import ClusterConfig, ClusterKind, Device, GpuRequest
from hpctrain.doctor.findings import Finding, Level, has_problem
from hpctrain.doctor.judge_request import (
    count_findings,
    find_partition,
    find_qos,
    gpu_findings,
    memory_findings,
    nearest,
    node_findings,
    permission_findings,
    time_findings,
)
from hpctrain.slurm.site import Site
from tests.doctor.sites import LAB_PARTITIONS, centre, lab, make_site, node_text, small


def cluster(**changes: Any) -> ClusterConfig:
    """A run of 4 nodes x 8 GPUs that suits the lab."""
    suits = ClusterConfig(
        kind=ClusterKind.slurm,
        device=Device.cuda,
        num_nodes=4,
        ranks_per_node=8,
        cpus_per_rank=8,
        gpu_request=GpuRequest.gres,
        gpu_type="nvidia_geforce_rtx_4090",
        time_limit_min=1440,
        account="vision",
    )
    return replace(suits, **changes)


def judged(site: Site, asked: ClusterConfig) -> list[Finding]:
    """All that these rules find."""
    partition, found = find_partition(site, asked)
    if partition is None:
        return [found]
    qos = find_qos(site, asked, partition)
    return [
        found,
        *permission_findings(site, asked, partition),
        *node_findings(site, asked, partition),
        *memory_findings(site, asked, partition),
        *time_findings(site, asked, partition, qos),
        *count_findings(site, asked, qos),
    ]


def problems(site: Site, asked: ClusterConfig) -> dict[str, Finding]:
    return {finding.topic: finding for finding in judged(site, asked) if finding.level is Level.problem}


@pytest.mark.parametrize(
    ("site", "asked"),
    [
        (lab(), cluster()),
        (lab(), cluster(account=None, num_nodes=1, ranks_per_node=2)),
        (centre(), cluster(gpu_type=None, account="a1", qos="scavenge")),
        (small(), cluster(account=None, time_limit_min=None)),
    ],
    ids=["lab", "lab, part of a node", "centre", "small"],
)
def test_a_request_that_suits_the_site_has_no_problem(site: Site, asked: ClusterConfig) -> None:
    assert not has_problem(judged(site, asked)), problems(site, asked)


@pytest.mark.parametrize(
    ("changes", "topic", "change"),
    [
        ({"partition": "gpus"}, "partition", "cluster.partition=gpu"),
        ({"account": "visoin"}, "account", "cluster.account=vision"),
        ({"qos": "high"}, "qos", "cluster.qos=normal"),
        ({"gpu_type": "rtx4090"}, "GPUs", "cluster.gpu_type=nvidia_geforce_rtx_4090"),
        ({"gpu_request": GpuRequest.none}, "GPUs", "cluster.gpu_request=gres"),
        ({"time_limit_min": 4320}, "time limit", "cluster.time_limit_min=2880"),
        ({"num_nodes": 6}, "nodes", "cluster.num_nodes=4"),
        ({"cpus_per_rank": 9}, "nodes", "less of it"),
        ({"mem_gib": 501}, "nodes", "less of it"),  # 512000 MiB are 500 GiB
        ({"ranks_per_node": 9, "cpus_per_rank": 1}, "nodes", "less of it"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_the_lab_cannot_give_is_found_with_what_to_change(
    changes: dict[str, Any], topic: str, change: str
) -> None:
    found = problems(lab(), cluster(**changes))
    assert found[topic].change.startswith(change)
    assert found.keys() == {topic}


def test_a_type_is_not_asked_for_where_gpus_have_none() -> None:
    found = problems(centre(), cluster(gpu_type="rtx4090", account="a1"))
    assert found["GPUs"].change == "cluster.gpu_type=null"


def test_gpus_that_slurm_does_not_know_cannot_be_asked_for() -> None:
    site = make_site(nodes="\n".join(node_text(f"gpu0{n}", gres="(null)") for n in range(4)))
    assert "cluster.gpu_request=none" in problems(site, cluster(gpu_type=None))["GPUs"].change


def test_two_types_may_be_mixed_when_none_is_named() -> None:
    site = make_site(nodes=node_text("a") + "\n" + node_text("b", gres="gpu:a100:8"))
    (found,) = gpu_findings(cluster(gpu_type=None), list(site.nodes))
    assert found.level is Level.notice and "gpu:a100" in found.found


def drained(count: int) -> Site:
    """The lab with the last nodes drained."""
    texts = [
        node_text(f"gpu0{n}", state="IDLE+DRAIN", reason="fan [root@2026-11-30T11:00:43]")
        if n > 4 - count
        else node_text(f"gpu0{n}")
        for n in (1, 2, 3, 4)
    ]
    return make_site(nodes="\n".join(texts))


def test_drained_nodes_that_are_needed_are_a_problem_and_named_with_their_reason() -> None:
    found = problems(drained(2), cluster())["nodes"]
    assert "gpu03 IDLE+DRAIN (fan" in found.found and "waits until 2 more" in found.means
    assert found.change.startswith("cluster.num_nodes=2")


def test_drained_nodes_that_are_not_needed_are_noticed() -> None:
    site = drained(2)
    (found,) = [f for f in judged(site, cluster(num_nodes=2)) if f.topic == "nodes"]
    assert found.level is Level.notice and "gpu04" in found.found


def test_a_limit_of_nodes_a_job_is_found() -> None:
    site = make_site(partitions=LAB_PARTITIONS.replace("MaxNodes=UNLIMITED", "MaxNodes=2"))
    assert problems(site, cluster())["MaxNodes"].change == "cluster.num_nodes=2"


def test_a_partition_that_is_down_is_a_problem() -> None:
    site = make_site(partitions=LAB_PARTITIONS.replace("State=UP", "State=DOWN"))
    assert "partition" in problems(site, cluster())


def test_a_job_above_max_time_waits_for_ever_where_limits_are_not_enforced() -> None:
    lax = problems(lab(EnforcePartLimits="NO"), cluster(time_limit_min=9999))["time limit"]
    strict = problems(lab(), cluster(time_limit_min=9999))["time limit"]
    assert "for ever" in lax.means and "refuses" in strict.means


def test_the_limit_of_the_qos_counts_too() -> None:
    found = problems(centre(), cluster(gpu_type=None, account="a1", time_limit_min=2000))["time limit"]
    assert "QOS normal" in found.found and found.change.startswith("cluster.time_limit_min=1440")


def test_a_short_default_time_is_noticed_where_no_limit_is_asked_for() -> None:
    site = make_site(partitions=LAB_PARTITIONS.replace("DefaultTime=04:00:00", "DefaultTime=00:30:00"))
    (found,) = [f for f in judged(site, cluster(time_limit_min=None)) if f.topic == "time limit"]
    assert found.level is Level.notice and "30 min" in found.found


def test_an_unknown_account_is_no_more_than_noticed_where_slurm_does_not_enforce_it() -> None:
    found = judged(lab(AccountingStorageEnforce="none"), cluster(account="visoin"))
    assert [f.level for f in found if f.topic == "account"] == [Level.notice]


def test_a_partition_for_other_accounts_is_found() -> None:
    site = make_site(partitions=LAB_PARTITIONS.replace("AllowAccounts=ALL", "AllowAccounts=speech"))
    assert "AllowAccounts" in problems(site, cluster())


def test_a_qos_that_the_account_may_not_use_is_found() -> None:
    found = problems(centre(), cluster(gpu_type=None, account="a2", qos="scavenge"))
    assert found["qos"].change == "cluster.qos=normal"


@pytest.mark.parametrize(("size", "level"), [("1001", Level.ok), ("10", Level.notice)])
def test_a_small_max_array_size_is_noticed(size: str, level: Level) -> None:
    (found,) = [f for f in judged(lab(MaxArraySize=size), cluster()) if f.topic == "MaxArraySize"]
    assert found.level is level
    # slurm.conf(5): the largest index is one less than MaxArraySize, and the first one is 0.
    assert f"{len(range(int(size)))} points" in found.means


@pytest.mark.parametrize(("queued", "level"), [(10, Level.ok), (50, Level.problem)])
def test_a_full_share_of_the_queue_is_found(queued: int, level: Level) -> None:
    findings = judged(centre(queued_jobs=queued), cluster(gpu_type=None, account="a1"))
    assert [f.level for f in findings if f.topic == "MaxSubmitJobs"] == [level]


def test_a_small_default_memory_is_noticed_where_slurm_counts_memory() -> None:
    few = make_site(partitions=LAB_PARTITIONS.replace("DefMemPerCPU=4000", "DefMemPerCPU=500"))
    (found,) = [f for f in judged(few, cluster()) if f.topic == "memory"]
    assert found.level is Level.notice and "32 GiB" in found.found  # 64 CPUs x 500 MiB
    assert not [f for f in judged(lab(SelectTypeParameters="CR_CPU"), cluster()) if f.topic == "memory"]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("rtx4090", "nvidia_geforce_rtx_4090"), ("RTX-4090", "nvidia_geforce_rtx_4090"), ("h10", "h100")],
)
def test_the_nearest_name_is_the_one_that_was_meant(asked: str, meant: str) -> None:
    assert nearest(asked, ["nvidia_geforce_rtx_4090", "h100"]) == meant


def test_where_nothing_is_near_all_names_are_shown() -> None:
    assert nearest("xyz", ["b", "a"]) == "a, b"
