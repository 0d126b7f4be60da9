from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.cli import compose
from hpctrain.config.schema import ClusterKind, Config, Device, VisionConfig
from hpctrain.doctor import cluster_file, doctor
from hpctrain.doctor.findings import Level, has_problem, notice, ok, problem, question, summary, to_text
from hpctrain.errors import ConfigError
from hpctrain.launch import submit
from hpctrain.run.ledger import Ledger
from tests.doctor.sites import LAB_CONFIG, lab, make_site, node_text, small


def run_config(tmp_path: Path) -> Config:
    config = Config(model=VisionConfig(), name="city", run_root=str(tmp_path))
    config.optim.global_batch_size = 64
    return config


def test_a_measured_save_counts_and_not_the_plans(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    assert doctor.save_time(config, None) is None
    (tmp_path / "city").mkdir()
    ledger = Ledger(tmp_path / "city" / "ledger.jsonl")
    ledger.append("saved", attempt="1_0_1", step=10)  # of a version that did not measure
    assert doctor.save_time(config, None) is None
    for seconds in (4.0, 9.0, 5.0):
        ledger.append("saved", attempt="1_0_1", step=20, save_s=seconds)
    records = [
        {"kind": "train", "samples_per_s": 32.0},
        {"kind": "eval"},
        {"kind": "train", "samples_per_s": 16.0},
    ]
    (tmp_path / "city" / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records) + '{"to')
    found = doctor.save_time(config, None)
    assert found is not None and found.source.startswith("measured")
    assert (found.save_s, found.step_s, found.total_s) == (9.0, 4.0, 13.0)  # 64 samples at 16 a second


def test_a_local_run_has_no_cluster_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has none"):
        doctor.doctor(run_config(tmp_path), as_json=False)


def report(**nodes: list[str]) -> dict[str, Any]:
    return {
        "nodes": {
            name: {"reasons": reasons, "driver": "550.54.14", "gpus": 8, "torch": None}
            for name, reasons in nodes.items()
        },
        "exclude": [name for name, reasons in nodes.items() if reasons],
    }


def test_sick_nodes_of_the_last_preflight_are_named_until_they_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.slurm.expand", lambda text: text.split(",") if text else [])
    config, found = run_config(tmp_path), report(n1=[], n2=["GPU 1: 5 uncorrected ECC errors"])
    (finding,) = doctor.sick_findings(config, found)
    assert finding.level is Level.notice and finding.change.startswith("cluster.exclude=n2")
    config.cluster.exclude = "n2"
    assert [f.level for f in doctor.sick_findings(config, found)] == [Level.ok]
    assert doctor.sick_findings(config, None) == []


def test_drivers_of_the_last_preflight_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.slurm.expand", lambda text: [])
    config = run_config(tmp_path)
    config.cluster.device = Device.cuda
    (finding,) = doctor.node_software(config, ["n1"])
    assert finding.level is Level.question and finding.change == "hpctrain preflight"
    (tmp_path / "preflight").mkdir()
    (tmp_path / "preflight" / "preflight.json").write_text(json.dumps(report(n1=[])))
    driver, unknown, _ = doctor.node_software(config, ["n1", "n2"])
    assert driver.level is Level.problem and "n1 550.54.14" in driver.found  # torch 2.14 needs 580
    assert unknown.level is Level.question and unknown.found == "not known of n2"


def test_nodes_are_narrowed_as_sbatch_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.slurm.expand", lambda text: text.split(",") if text else [])
    config = run_config(tmp_path)
    config.cluster.exclude, config.cluster.nodelist = "gpu01", "gpu01,gpu02"
    assert [node.name for node in doctor.narrowed(lab(), config).nodes] == ["gpu02"]
    config.cluster.exclude, config.cluster.nodelist, config.cluster.constraint = None, None, "h100"
    assert doctor.narrowed(lab(), config).nodes == ()
    config.cluster.constraint = "ib"
    assert len(doctor.narrowed(lab(), config).nodes) == 4


def test_shapes_are_halves_and_doubles_that_the_plan_takes(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    config.cluster.kind, config.cluster.num_nodes, config.cluster.ranks_per_node = ClusterKind.slurm, 4, 1
    assert doctor.shapes(config, 8) == [1, 2, 4, 8]
    config.optim.global_batch_size = 4  # eight ranks would have nothing to do
    assert doctor.shapes(config, 8) == [1, 2, 4]


def test_findings_are_told_worst_first_and_counted() -> None:
    findings = [
        ok("a", "fine"),
        notice("b", "is", "so"),
        question("c", "?"),
        problem("d", "is", "means", "do"),
    ]
    lines = to_text(findings).splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == ["✗ d", "? c", "! b", "✓ a"]
    assert summary(findings) == "1 problem, 1 question, 1 notice, 1 ok"
    assert has_problem(findings) and not has_problem(findings[:3])


FACTS: dict[str, Any] = {
    "node": "gpu01",
    "gpus": [{"name": "NVIDIA GeForce RTX 4090"}],
    "no_gpus": "",
    "driver": "580.65.06",
    "driver_cuda": "13.0",
    "pcie_roots": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "python": "3.11.2",
    "torch": {"version": "2.14.1+cu130", "cuda": "13.0"},
    "nics": [
        {"name": "lo", "address": "127.0.0.1", "speed_gbit": None, "is_virtual": True, "mtu": 65536},
        {"name": "eno1", "address": "10.0.0.1", "speed_gbit": 1.0, "is_virtual": False, "mtu": 1500},
        {"name": "ens1", "address": "10.1.0.1", "speed_gbit": 100.0, "is_virtual": False, "mtu": 9000},
    ],
    "rdma": [
        {
            "device": "mlx5_0", "port": 1, "state": "ACTIVE", "rate": "100 Gb/sec", "layer": "Ethernet",
            "gids": [{"index": 3, "gid": "0000:0000:0000:0000:0000:ffff:0a01:0001", "type": "RoCE v2"}],
        }
    ],
    "memlock_bytes": 65536,
    "shm_gib": 251.0,
    "scratch": [{"path": "/local", "type": "xfs", "free_gib": 3000.0}],
    "run_folder": {"path": "/home/an/runs", "type": "nfs4", "free_gib": 90.0, "quota": "home 50G of 100G"},
}  # fmt: skip


def written(facts: dict[str, Any] | None, **changes: Any) -> tuple[str, dict[str, Any]]:
    site = make_site(**changes)
    text = cluster_file.render(
        "mine", site, site.partitions["gpu"], "vision", None, facts, "no node was free"
    )
    return text, yaml.safe_load(text)


def test_a_cluster_file_has_what_slurm_and_a_node_say() -> None:
    text, keys = written(FACTS)
    assert keys == {
        "kind": "slurm",
        "device": "cuda",
        "hardware": "rtx4090",
        "num_nodes": 4,
        "ranks_per_node": 8,
        "cpus_per_rank": 8,
        "gpu_request": "gres",
        "gpu_type": "nvidia_geforce_rtx_4090",
        "pcie_roots": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "partition": "gpu",
        "account": "vision",
        "mem_gib": 475,  # 95 % of 500
        "time_limit_min": 2880,
        "signal_lead_s": 120,
        "network_interface": "ens1",
        "env": {"NCCL_IB_GID_INDEX": "3"},
    }
    for fact in (
        "# node gpu01: driver 580.65.06, up to CUDA 13.0; python 3.11.2, torch 2.14.1+cu130, CUDA 13.0",
        "# preemption: REQUEUE, 120 s of grace, then KillWait 30 sec",
        "# locked memory (ulimit -l): 0 MiB; RDMA needs unlimited",
        "# scratch: /local (xfs), 3000 GiB free",
        "#   home 50G of 100G",
        "# question: does node scratch keep its files over a requeue?",
    ):
        assert fact in text.splitlines()


def test_what_no_node_has_told_stays_a_question() -> None:
    text, keys = written(None)
    assert "# question: what a node sees was not learned: no node was free" in text
    assert "# question: pcie_roots" in text and "network_interface" not in keys


def test_an_unknown_card_is_a_question_about_the_catalogue() -> None:
    nodes = node_text("n1", gres="gpu:rtx5090:4")
    text, keys = written(None, nodes=nodes)
    assert "# question: which entry of the catalogue is rtx5090?" in text
    assert (keys["ranks_per_node"], keys["cpus_per_rank"]) == (4, 16)


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        ("nvidia_geforce_rtx_4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("a100-sxm4-80gb", "a100"),
        ("nvidia_h100_80gb_hbm3", "h100"),
        ("t4", None),
        (None, None),
    ],
)
def test_a_types_name_means_an_entry_of_the_catalogue(kind: str | None, entry: str | None) -> None:
    assert cluster_file.catalogue_entry(kind) == entry


def test_the_partition_with_most_gpus_is_taken_and_the_default_among_equals() -> None:
    assert cluster_file.choose_partition(lab(), None).name == "gpu"
    site = make_site(nodes=node_text("a", partitions="gpu") + "\n" + node_text("b", partitions="day,gpu"))
    assert cluster_file.choose_partition(site, None).name == "gpu"
    assert cluster_file.choose_partition(site, "day").name == "day"
    with pytest.raises(ConfigError, match="gpu, day"):
        cluster_file.choose_partition(site, "night")


def test_no_file_is_overwritten_and_no_shipped_name_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = cluster_file.free_path("mine")
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(ConfigError, match="exists"):
        cluster_file.free_path("mine")
    for name in ("rtx4090", "../mine", "my file", ""):
        with pytest.raises(ConfigError):
            cluster_file.free_path(name)


def test_a_site_without_gpus_gets_a_file_for_cpus() -> None:
    site = make_site(LAB_CONFIG, nodes=node_text("n1", gres="(null)"), qos=None)
    text = cluster_file.render("mine", site, site.partitions["day"], None, None, None, "no node was free")
    keys = yaml.safe_load(text)
    assert (keys["device"], keys["hardware"], keys["gpu_request"]) == ("cpu", "cpu", "none")
    assert "# preemption: none in this partition" in text
    assert "# preemption: none" in cluster_file.render(
        "mine", small(), replace(small().partitions["gpu"]), None, None, None, ""
    )


def test_a_deadline_does_not_keep_doctor_from_the_plan(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    config.deadline = "1s"
    _, plan, refusal = doctor.planned(config)
    assert plan is not None and refusal == []
    config.optim.global_batch_size = 3  # of two ranks
    _, plan, (finding,) = doctor.planned(config)
    assert plan is None and finding.level is Level.problem and "global_batch_size" in finding.found


def composed(*overrides: str) -> Config:
    (point,) = compose([*overrides])
    return point.resolve(without_data=True)


def test_a_layout_that_the_planner_chooses_is_judged_as_submit_takes_it() -> None:
    asked = composed("+exp=finance_callbot", "parallelism=auto")
    chosen, plan, refusal = doctor.planned(asked)
    assert plan is not None and refusal == []
    # 32 cards of 24 GiB.
    assert plan.world_size == 32 and max(memory.total for memory in plan.memory) < 24 * 2**30
    assert asked.parallelism.auto and not chosen.parallelism.auto


def test_nodes_that_the_deadline_chooses_are_those_of_the_job() -> None:
    asked = composed("+exp=vision_city", "cluster.num_nodes=-1", "deadline=36h")
    (option,) = (line for line in submit.render(asked).splitlines() if line.startswith("#SBATCH --nodes="))
    asked = composed("+exp=vision_city", "cluster.num_nodes=-1", "deadline=36h")
    chosen, plan, refusal = doctor.planned(asked)
    assert plan is not None and refusal == []
    wanted = chosen.cluster.num_nodes
    assert option == f"#SBATCH --nodes={wanted}"
    assert {wanted, wanted // 2} <= set(doctor.shapes(doctor.with_nodes(asked, wanted), 8))


def test_where_no_number_of_nodes_meets_the_deadline_one_is_judged() -> None:
    chosen, plan, (finding,) = doctor.planned(
        composed("+exp=vision_city", "cluster.num_nodes=-1", "deadline=1s")
    )
    assert plan is None and "deadline" in finding.found and "must be positive" not in finding.found
    assert chosen.cluster.num_nodes == 1
