from __future__ import annotations

import pytest

from hpctrain.config.schema import ClusterConfig
from hpctrain.doctor.findings import Finding, Level
from hpctrain.doctor.judge_stop import (
    SaveTime,
    ending_findings,
    parse_exit_codes,
    preemption,
    preemption_findings,
    requeue_findings,
)
from hpctrain.slurm.site import Site
from tests.doctor.sites import LAB_PARTITIONS, centre, lab, make_site, small

CLUSTER = ClusterConfig(signal_lead_s=120)


def save(seconds: float, step_s: float = 0.0) -> SaveTime:
    return SaveTime(save_s=seconds, step_s=step_s, source="measured")


def of(findings: list[Finding], topic: str) -> Finding:
    (found,) = [finding for finding in findings if finding.topic == topic]
    return found


def judged(site: Site, name: str, seconds: float | None, qos: str | None = None) -> list[Finding]:
    chosen = site.qos[qos] if site.qos and qos else None
    return preemption_findings(
        site, site.partitions[name], chosen, None if seconds is None else save(seconds)
    )


def test_a_partition_of_lower_tier_is_preempted_by_those_above_that_share_its_nodes() -> None:
    site = lab()
    found = preemption(site, site.partitions["gpu"], None)
    assert found is not None and (found.mode, found.grace_s, found.by) == ("REQUEUE", 120, ("day",))
    assert preemption(site, site.partitions["day"], None) is None


def test_partitions_that_share_no_node_do_not_preempt_each_other() -> None:
    elsewhere = "\n".join(
        f"NodeName=n{n}\n   Gres=(null) CPUTot=4 State=IDLE NodeAddr=n NodeHostName=n\n   RealMemory=9\n"
        f"   Partitions={partition}\n"
        for n, partition in enumerate(("gpu", "day"))
    )
    site = make_site(nodes=elsewhere)
    assert preemption(site, site.partitions["gpu"], None) is None


def test_with_preemption_by_qos_the_qos_gives_grace_and_mode() -> None:
    site = centre()
    assert site.qos is not None
    found = preemption(site, site.partitions["gpu"], site.qos["scavenge"])
    assert found is not None and (found.mode, found.grace_s, found.by) == ("REQUEUE", 120, ("normal",))
    assert preemption(site, site.partitions["gpu"], site.qos["normal"]) is None


def test_where_nobody_preempts_there_is_nothing_to_find() -> None:
    findings = judged(small(), "gpu", 1000.0)
    assert [finding.level for finding in findings] == [Level.ok]


@pytest.mark.parametrize(
    ("save_s", "level"),
    [(150.0, Level.problem), (100.0, Level.notice), (20.0, Level.ok), (None, Level.question)],
)
def test_a_save_is_held_against_the_grace_of_120_s(save_s: float | None, level: Level) -> None:
    assert of(judged(lab(), "gpu", save_s), "GraceTime").level is level


def test_the_step_in_hand_counts_before_the_save() -> None:
    site = lab()
    findings = preemption_findings(site, site.partitions["gpu"], None, save(30.0, step_s=100.0))
    assert of(findings, "GraceTime").level is Level.problem


@pytest.mark.parametrize(("save_s", "level"), [(25.0, Level.problem), (4.0, Level.ok)])
def test_without_grace_kill_wait_is_all_there_is(save_s: float, level: Level) -> None:
    site = make_site(partitions=LAB_PARTITIONS.replace("GraceTime=120", "GraceTime=0"))
    found = of(judged(site, "gpu", save_s), "GraceTime")
    assert found.level is level and "KillWait" in found.found


@pytest.mark.parametrize(("save_s", "level"), [(20.0, Level.notice), (100.0, Level.problem)])
def test_preempt_mode_cancel_loses_a_run_that_has_no_time_to_requeue_itself(
    save_s: float, level: Level
) -> None:
    site = make_site(partitions=LAB_PARTITIONS.replace("PreemptMode=REQUEUE", "PreemptMode=CANCEL"))
    assert of(judged(site, "gpu", save_s), "PreemptMode").level is level


def test_suspending_is_a_problem_for_ranks_that_wait_for_each_other() -> None:
    site = make_site(partitions=LAB_PARTITIONS.replace("PreemptMode=REQUEUE", "PreemptMode=SUSPEND"))
    assert of(judged(site, "gpu", 1.0), "PreemptMode").level is Level.problem


@pytest.mark.parametrize("where", ["PreemptParameters", "SlurmctldParameters"])
def test_either_signal_of_a_preemption_will_do(where: str) -> None:
    name = "send_user_signal" if where == "PreemptParameters" else "preempt_send_user_signal"
    found = of(judged(lab(**{where: name}), "gpu", 1.0), "send_user_signal")
    assert found.level is Level.ok and "--signal" in found.found
    assert "SIGTERM" in of(judged(lab(), "gpu", 1.0), "send_user_signal").found


def test_the_time_limit_warns_too_late_for_a_long_save() -> None:
    assert of(ending_findings(lab(), CLUSTER, save(130.0)), "signal_lead_s").level is Level.problem
    assert of(ending_findings(lab(), CLUSTER, save(60.0)), "signal_lead_s").level is Level.ok


def test_a_tiny_kill_wait_is_noticed() -> None:
    assert of(ending_findings(lab(KillWait="1 sec"), CLUSTER, None), "KillWait").level is Level.notice
    assert of(ending_findings(lab(), CLUSTER, None), "KillWait").level is Level.ok


def test_job_requeue_does_not_matter_since_jobs_ask_themselves() -> None:
    assert {of(requeue_findings(lab(JobRequeue=v)), "JobRequeue").level for v in "01"} == {Level.ok}


@pytest.mark.parametrize(
    ("setting", "codes", "level"),
    [
        ("RequeueExit", "1-10,100", Level.problem),
        ("RequeueExit", "100-120", Level.ok),
        ("RequeueExitHold", "1", Level.notice),
    ],
)
def test_exit_codes_that_slurm_requeues_must_not_be_those_of_a_failed_run(
    setting: str, codes: str, level: Level
) -> None:
    findings = requeue_findings(lab(**{setting: codes}))
    assert level in {finding.level for finding in findings if finding.topic.startswith("RequeueExit")}


def test_exit_codes_are_read_as_lists_and_ranges() -> None:
    assert parse_exit_codes("1,5-7, 100") == {1, 5, 6, 7, 100}
    assert parse_exit_codes("") == set()


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 120),
        ({"AuthInfo": "socket=/run/x,cred_expire=10"}, 10),
        ({"SchedulerParameters": "bf_continue,requeue_delay=30"}, 30),
    ],
)
def test_the_delay_of_a_requeue_is_told(settings: dict[str, str], seconds: int) -> None:
    assert f"{seconds} s" in of(requeue_findings(lab(**settings)), "requeue delay").found


def test_a_low_limit_of_batch_requeues_counts_from_24_05_on() -> None:
    old = make_site(version=(23, 11), MaxBatchRequeue="2")
    topics = [{f.topic for f in judged(site, "gpu", 1.0)} for site in (lab(MaxBatchRequeue="2"), old)]
    assert ["MaxBatchRequeue" in each for each in topics] == [True, False]
