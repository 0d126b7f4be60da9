from __future__ import annotations

import time

import pytest

from hpctrain.slurm.records import parse_nodes
from hpctrain.slurm.site import (
    Gres,
    is_out,
    parse_associations,
    parse_expected_start,
    parse_gres,
    parse_qos,
    parse_settings,
    parse_shares,
    parse_standings,
)
from tests.doctor.sites import CENTRE_ASSOC, CENTRE_QOS, lab, node_text


def test_settings_keep_values_with_equal_signs_and_empty_ones() -> None:
    # Lines of `scontrol show config`, 22.05.8.
    text = (
        "Configuration data as of 2026-11-30T17:16:29\n"
        "AuthInfo                = socket=/run/munge.socket,cred_expire=10\n"
        "PriorityFlags           = \n"
        "SlurmctldHost[0]        = vm(127.0.0.1)\n"
        "\nSlurmctld(primary) at vm is UP\n"
    )
    assert parse_settings(text) == {
        "AuthInfo": "socket=/run/munge.socket,cred_expire=10",
        "PriorityFlags": "",
        "SlurmctldHost[0]": "vm(127.0.0.1)",
    }


def test_a_setting_that_slurm_does_not_know_or_has_not_set_is_empty() -> None:
    site = lab(KillWait="30 sec", BatchStartTimeout="5 min", RequeueExit="(null)")
    assert (site.setting("RequeueExit"), site.setting("NoSuchThing")) == ("", "")
    assert (site.seconds("KillWait"), site.seconds("BatchStartTimeout"), site.seconds("X")) == (30, 300, None)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("gpu:rtx4090:8", [Gres("gpu", "rtx4090", 8)]),
        ("gpu:nvidia_geforce_rtx_4090:8(S:0-1)", [Gres("gpu", "nvidia_geforce_rtx_4090", 8)]),
        ("gpu:4", [Gres("gpu", None, 4)]),
        ("gpu", [Gres("gpu", None, 1)]),
        ("gpu:a100:2(S:0),gpu:t4:1(S:1),mps:400", [
            Gres("gpu", "a100", 2), Gres("gpu", "t4", 1), Gres("mps", None, 400),
        ]),
        ("bandwidth:lustre:no_consume:4K", [Gres("bandwidth", "lustre", 4096)]),
        ("", []),
    ],
)  # fmt: skip
def test_generic_resources_are_read_in_every_form_of_the_manual(text: str, parts: list[Gres]) -> None:
    assert parse_gres(text) == parts


@pytest.mark.parametrize(
    ("state", "out"),
    [
        ("IDLE", False),
        ("MIXED+PLANNED", False),
        ("ALLOCATED+COMPLETING", False),
        ("IDLE+POWERED_DOWN", False),  # wakes up by itself
        ("IDLE~", False),
        ("IDLE+DRAIN", True),
        ("DOWN*", True),
        ("IDLE*", True),  # does not answer
        ("DOWN+NOT_RESPONDING", True),
        ("MIXED+MAINT", True),
    ],
)
def test_a_node_is_out_when_it_takes_no_job_until_somebody_acts(state: str, out: bool) -> None:
    (node,) = parse_nodes(node_text("n1", state=state))
    assert is_out(node) is out


def test_nodes_tell_their_partitions_and_features() -> None:
    (node,) = parse_nodes(node_text("n1"))
    assert (node.partitions, node.features) == (("gpu", "day"), ("avx2", "ib"))


def test_qos_tell_grace_and_whom_they_preempt() -> None:
    qos = parse_qos(CENTRE_QOS)
    assert qos["normal"].preempts == ("scavenge",) and qos["normal"].max_submit_per_user == 50
    assert (qos["normal"].max_wall_s, qos["scavenge"].max_wall_s) == (86_400, None)
    assert (qos["scavenge"].grace_time_s, qos["scavenge"].preempt_mode) == (120, "requeue")


def test_associations_are_those_of_the_user_alone() -> None:
    assert [each.account for each in parse_associations(CENTRE_ASSOC, "an")] == ["a1", "a2"]
    assert parse_associations(CENTRE_ASSOC, "binh") == []


def test_shares_skip_accounts_and_read_the_users_factor() -> None:
    # `sshare --parsable2 --users=an`: names are indented by their depth.
    text = (
        "Account|User|RawShares|NormShares|RawUsage|EffectvUsage|FairShare\n"
        "root|||0.000000|900|1.000000|\n"
        " vision||10|0.500000|800|0.888889|\n"
        "  vision|an|1|0.250000|700|0.875000|0.125000\n"
        "  vision|binh|3|0.750000|100|0.125000|0.900000\n"
    )
    (share,) = parse_shares(text, "an")
    assert (share.account, share.fair_share, share.effective_usage) == ("vision", 0.125, 0.875)


def test_standings_name_the_factors_that_count() -> None:
    (standing,) = parse_standings("  12|    1500|    500|   1000|      0|      0|      0|\n")
    assert (standing.job_id, standing.priority) == ("12", 1500)
    assert standing.factors == {"age": 500, "fair share": 1000}


def test_expected_starts_are_read_from_sbatch_test_only() -> None:
    # As 22.05.8 printed them.
    said = "sbatch: Job 1 to start at 2026-11-30T17:19:26 using 16 processors on nodes node[0-1] in partition"
    start = parse_expected_start(f"{said} train\n", 0)
    assert start.nodes == "node[0-1]"
    assert start.start_time_s == time.mktime(time.strptime("2026-11-30T17:19:26", "%Y-%m-%dT%H:%M:%S"))
    refused = parse_expected_start("allocation failure: Requested node configuration is not available", 1)
    assert (refused.start_time_s, refused.said) == (None, "Requested node configuration is not available")
