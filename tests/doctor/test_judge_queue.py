from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.config.schema import ClusterConfig, GpuRequest
from hpctrain.doctor.findings import Level
from hpctrain.doctor.judge_queue import (
    accounting_findings,
    bill,
    cost_findings,
    parse_tres,
    parse_weights,
    share_findings,
    start_findings,
)
from hpctrain.slurm.site import ExpectedStart, Share, Standing
from tests.doctor.sites import lab, make_site, small

ASKED = ClusterConfig(
    num_nodes=2, ranks_per_node=8, cpus_per_rank=4, mem_gib=100, gpu_request=GpuRequest.gres, account="vision"
)


def test_resources_are_read_with_memory_in_gib() -> None:
    assert parse_tres("cpu=32,mem=2048M,gres/gpu=8") == {"cpu": 32, "mem": 2, "gres/gpu": 8}
    assert parse_tres("mem=1T,node=4") == {"mem": 1024, "node": 4}
    assert parse_tres("mem=2048")["mem"] == 2  # Slurm counts memory in MiB


def test_weights_of_memory_are_by_mib_unless_a_unit_says_otherwise() -> None:
    # slurm.conf(5): "Mem=0.25G" bills a quarter for each GB; memory without a unit is counted in MB.
    assert parse_weights("CPU=1.0,Mem=0.25G,GRES/gpu=2.0") == {"cpu": 1.0, "mem": 0.25, "gres/gpu": 2.0}
    assert parse_weights("Mem=0.25")["mem"] == pytest.approx(256)


def test_the_bill_is_the_manuals_example() -> None:
    # slurm.conf(5), TRESBillingWeights: 1 CPU and 8 GB under CPU=1.0,Mem=0.25G,GRES/gpu=2.0 are billed
    # 1·1.0 + 8·0.25 + 0·2.0 = 3 added up, and max(1·1.0, 8·0.25, 0·2.0) = 2 with MAX_TRES.
    weights = parse_weights("CPU=1.0,Mem=0.25G,GRES/gpu=2.0")
    added, largest = (bill({"cpu": 1, "mem": 8, "gres/gpu": 0}, weights, is_max) for is_max in (False, True))
    assert added is not None and largest is not None
    assert (added.total, largest.total, largest.dominant) == (3.0, 2.0, "mem")


def test_the_dominant_resource_is_the_largest_share_of_the_partition() -> None:
    # 64 of 256 CPUs, 200 of 2000 GiB, 16 of 32 GPUs.
    site = lab()
    findings = {f.topic: f for f in cost_findings(site, ASKED, site.partitions["gpu"])}
    assert findings["dominant resource"].found == "gres/gpu, 50% of partition gpu"
    # 64·1 + 200·0.25 + 16·8
    assert findings["bill"].found.startswith("242 an hour, added up")
    assert findings["bill"].level is Level.ok


def test_cpus_that_cost_more_than_the_gpus_are_noticed() -> None:
    site, asked = lab(PriorityFlags="MAX_TRES"), replace(ASKED, ranks_per_node=4, cpus_per_rank=16)
    findings = {f.topic: f for f in cost_findings(site, asked, site.partitions["gpu"])}
    assert findings["bill"].level is Level.notice and "cpus_per_rank" in findings["bill"].change
    assert findings["bill"].found.startswith("128 an hour, the largest counts")


def test_no_accounting_is_noticed_and_is_no_problem() -> None:
    (found,) = accounting_findings(small())
    assert found.level is Level.notice and "ledger" in found.means


def test_accounting_that_books_no_gpus_and_a_short_memory_are_noticed() -> None:
    topics = {
        f.topic: f.level for f in accounting_findings(lab(AccountingStorageTRES="cpu", MinJobAge="5 sec"))
    }
    assert topics["AccountingStorageTRES"] is topics["MinJobAge"] is Level.notice
    assert {f.level for f in accounting_findings(lab())} == {Level.ok}


def test_sacctmgr_that_does_not_answer_is_a_question() -> None:
    assert Level.question in {f.level for f in accounting_findings(make_site(qos=None))}


def share(account: str, factor: float) -> Share:
    return Share(account=account, norm_shares=0.5, effective_usage=0.9, fair_share=factor)


def test_a_poor_standing_is_noticed_with_a_better_account() -> None:
    site = replace(lab(), shares=(share("vision", 0.1), share("speech", 0.8)))
    (found,) = share_findings(site, ASKED)
    assert found.level is Level.notice and found.change == "cluster.account=speech"
    good = replace(lab(), shares=(share("vision", 0.6),))
    assert [f.level for f in share_findings(good, ASKED)] == [Level.ok]


def test_fair_share_without_a_weight_does_not_count() -> None:
    site = replace(lab(PriorityWeightFairShare="0"), shares=(share("vision", 0.1),))
    assert [f.level for f in share_findings(site, ASKED)] == [Level.ok]
    assert "arrival" in share_findings(small(), ASKED)[0].means


def test_pending_jobs_show_what_their_priority_is_made_of() -> None:
    standing = Standing(job_id="12", priority=1500, factors={"age": 500, "fair share": 1000})
    found = share_findings(replace(lab(), standings=(standing,)), ASKED)[-1]
    assert found.found == "pending job 12: 1500 (age 500, fair share 1000)"


def starts(**waits_s: float | None) -> list[tuple[int, ExpectedStart]]:
    return [
        (
            int(name[1:]),
            ExpectedStart(start_time_s=None if wait is None else 1000 + wait, nodes="", said="no such nodes"),
        )
        for name, wait in waits_s.items()
    ]


def test_fewer_nodes_that_start_hours_earlier_are_proposed() -> None:
    (found,) = start_findings(starts(n2=0, n4=60, n8=36_000), 8, now_s=1000)
    assert found.level is Level.notice and found.change.startswith("cluster.num_nodes=4")
    assert found.found == "2 nodes now; 4 nodes in 1 min; 8 nodes in 10.0 h"


def test_equal_starts_are_told_and_nothing_proposed() -> None:
    (found,) = start_findings(starts(n2=0, n4=0), 4, now_s=1000)
    assert found.level is Level.ok and found.found == "2 nodes now; 4 nodes now"


def test_a_shape_that_slurm_would_not_take_is_told_with_its_words() -> None:
    (found,) = start_findings(starts(n2=0, n4=None), 4, now_s=1000)
    assert "no such nodes" in found.means and found.change == "cluster.num_nodes=2"
