from __future__ import annotations

import copy
from typing import Any

import pytest

from hpctrain.doctor import verdict

Answer = dict[str, Any]


def gpu(index: int, **changes: Any) -> dict[str, Any]:
    healthy = {"index": index, "used_mib": 12, "temperature_c": 60, "sm_mhz": 2520, "throttle": 4}
    healthy |= {
        "pcie_gen": 4,
        "max_pcie_gen": 4,
        "pcie_width": 16,
        "max_pcie_width": 16,
        "ecc_uncorrected": None,
    }
    return {**healthy, **changes}


def answer(**changes: Any) -> Answer:
    """Of a healthy node with two GPUs."""
    healthy = {
        "gpus": [gpu(0), gpu(1)],
        "busy_gpus": [gpu(0), gpu(1)],
        "no_gpus": "",
        "driver": "580.65.06",
        "torch": {"version": "2.14.1+cu130", "cuda": "13.0"},
        "matmul": {"error": None, "gpus": [{"device": n, "wrong": 0, "tflops": 150.0} for n in (0, 1)]},
        "cpu": {"is_right": True, "seconds": 0.1},
        "disks": [
            {"what": "run folder", "path": "/runs", "error": None, "write_gbps": 0.1, "read_gbps": 0.1},
            {"what": "scratch", "path": "/tmp", "error": None, "write_gbps": 2.0, "read_gbps": 2.0},
        ],
        "nics": [
            {"name": "lo", "address": "127.0.0.1", "speed_gbit": None},
            {"name": "ens1", "address": "10.0.0.1", "speed_gbit": 25.0},
        ],
    }
    return copy.deepcopy({**healthy, **changes})


def four(**of_n3: Any) -> dict[str, Answer | None]:
    """Four healthy nodes, the last with changes."""
    return {f"n{n}": answer(**(of_n3 if n == 3 else {})) for n in range(4)}


def bad(answers: dict[str, Answer | None]) -> dict[str, list[str]]:
    judged = verdict.judge(answers, num_gpus=2, is_cuda=True)
    return {node: each.reasons for node, each in judged.items() if each.is_bad}


def test_nodes_that_are_alike_and_well_are_not_bad() -> None:
    assert bad(four()) == {}
    assert not any(v.notices for v in verdict.judge(four(), num_gpus=2, is_cuda=True).values())


def disk(**changes: Any) -> list[dict[str, Any]]:
    first, second = answer()["disks"]
    return [{**first, **changes}, second]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": [gpu(0)]}, "1 GPUs, the run asks for 2"),
        ({"gpus": [], "no_gpus": "driver not loaded"}, "0 GPUs, the run asks for 2: driver not loaded"),
        ({"driver": "550.54.14"}, "driver 550.54.14: torch for CUDA 13.0 needs 580"),
        ({"busy_gpus": [gpu(0), gpu(1, ecc_uncorrected=2)]}, "GPU 1: 2 uncorrected ECC errors"),
        ({"gpus": [gpu(0), gpu(1, pcie_width=8)]}, "GPU 1: PCIe width x8, others x16"),
        ({"busy_gpus": [gpu(0), gpu(1, pcie_gen=1)]}, "GPU 1: PCIe generation 1, others 4"),
        ({"busy_gpus": [gpu(0), gpu(1, sm_mhz=900)]}, "GPU 1: 900 MHz, others 2520"),
        ({"busy_gpus": [gpu(0), gpu(1, throttle=0x40)]}, "GPU 1: hardware thermal slowdown"),
        ({"gpus": [gpu(0), gpu(1, used_mib=9000)]}, "GPU 1: another process holds 9000 MiB"),
        ({"matmul": {"error": "CUDA error: unknown error", "gpus": []}}, "matrix products: CUDA error"),
        (
            {"matmul": {"error": None, "gpus": [{"device": 0, "wrong": 3, "tflops": 150.0}]}},
            "GPU 0: 3 wrong matrix products",
        ),
        (
            {"matmul": {"error": None, "gpus": [{"device": 0, "wrong": 0, "tflops": 70.0}]}},
            "GPU 0: 70 TFLOP/s, others 150",
        ),
        ({"cpu": {"is_right": False, "seconds": 0.1}}, "the CPU computed a wrong checksum"),
        ({"disks": disk(error="No space left on device")}, "run folder /runs: No space left"),
        ({"disks": disk(write_gbps=0.01)}, "run folder: writes 0.01 GB/s, others 0.1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_one_node_is_found_there_and_nowhere_else(changes: dict[str, Any], said: str) -> None:
    found = bad(four(**changes))
    assert found.keys() == {"n3"}
    assert any(reason.startswith(said) for reason in found["n3"]), found


def test_a_node_without_an_answer_is_bad() -> None:
    assert bad({**four(), "n9": None}) == {"n9": ["did not answer"]}


def test_a_disk_that_is_fast_enough_is_not_bad_for_being_slower_than_others() -> None:
    answers: dict[str, Answer | None] = {f"n{n}": answer(disks=disk(write_gbps=9.0)) for n in range(3)}
    assert bad({**answers, "n3": answer(disks=disk(write_gbps=0.9))}) == {}
    assert bad({**answers, "n3": answer(disks=disk(write_gbps=0.1))}).keys() == {"n3"}


def test_what_all_cards_share_is_the_make_of_the_board() -> None:
    answers: dict[str, Answer | None] = {
        f"n{n}": answer(gpus=[gpu(0, pcie_width=8), gpu(1, pcie_width=8)]) for n in range(4)
    }
    judged = verdict.judge(answers, num_gpus=2, is_cuda=True)
    assert not any(each.is_bad for each in judged.values())
    assert judged["n0"].notices == ["2 GPUs have PCIe x8 of x16"]


def test_another_driver_than_the_others_is_noticed() -> None:
    judged = verdict.judge(four(driver="590.44.01"), num_gpus=2, is_cuda=True)
    assert judged["n3"].notices == ["driver 590.44.01, others 580.65.06"]


def test_runs_on_the_cpu_need_no_gpus() -> None:
    answers = four(gpus=[], busy_gpus=[], driver=None, matmul=None)
    assert not any(v.is_bad for v in verdict.judge(answers, num_gpus=2, is_cuda=False).values())


def link(source: str, target: str, gbps: float | None) -> dict[str, Any]:
    return {"from": source, "to": target, "gbps": gbps, "error": None if gbps else "timed out"}


def ring(num: int, speed: Any) -> list[dict[str, Any]]:
    """Links of each node to its next and its next but one."""
    return [
        link(f"n{n}", f"n{(n + step) % num}", speed(n, (n + step) % num))
        for step in (1, 2)
        for n in range(num)
    ]


def judged_links(num: int, links: list[dict[str, Any]]) -> dict[str, verdict.Verdict]:
    verdicts = {f"n{n}": verdict.Verdict(f"n{n}") for n in range(num)}
    verdict.judge_links(verdicts, links)
    return verdicts


@pytest.mark.parametrize("end", [0, 1], ids=["sends slowly", "receives slowly"])
def test_a_slow_node_is_told_from_its_neighbours(end: int) -> None:
    verdicts = judged_links(4, ring(4, lambda *ends: 1.0 if ends[end] == 2 else 3.0))
    assert [node for node, each in verdicts.items() if each.is_bad] == ["n2"]


def test_one_slow_link_alone_makes_nobody_bad() -> None:
    verdicts = judged_links(4, ring(4, lambda a, b: 1.0 if (a, b) == (0, 1) else 3.0))
    assert not any(each.is_bad for each in verdicts.values())
    assert verdicts["n0"].notices == verdicts["n1"].notices == ["link n0 → n1: 1 GB/s"]


def test_a_node_that_nobody_reaches_is_bad() -> None:
    verdicts = judged_links(4, ring(4, lambda a, b: None if b == 3 else 3.0))
    assert [node for node, each in verdicts.items() if each.is_bad] == ["n3"]


def test_two_nodes_that_do_not_reach_each_other_are_both_bad() -> None:
    verdicts = judged_links(2, [link("n0", "n1", None), link("n1", "n0", 3.0)])
    assert all(each.is_bad for each in verdicts.values())
    slow = judged_links(2, [link("n0", "n1", 0.5), link("n1", "n0", 3.0)])
    assert not any(each.is_bad for each in slow.values()) and slow["n0"].notices


def test_links_that_are_all_alike_are_not_slow() -> None:
    assert not any(each.is_bad or each.notices for each in judged_links(4, ring(4, lambda *_: 0.1)).values())


def test_what_was_slow_once_is_not_slow_twice() -> None:
    again = verdict.better([link("n0", "n1", None), link("n1", "n0", 3.0)], [link("n0", "n1", 2.0)])
    assert [each["gbps"] for each in again] == [2.0, 3.0]


def test_the_chosen_interface_has_to_be_there_and_as_fast_as_the_others() -> None:
    slow = [{"name": "ens1", "address": "10.0.0.4", "speed_gbit": 10.0}]
    for nics, said in (
        (slow, "ens1 runs at 10 Gbit/s, others at 25"),
        ([{"name": "eth0", "address": "10.0.0.4", "speed_gbit": 25.0}], "no interface ens1; there are eth0"),
        ([{**slow[0], "address": None}], "interface ens1 has no IPv4 address"),
    ):
        answers = four(nics=nics)
        verdicts = verdict.judge(answers, num_gpus=2, is_cuda=True)
        verdict.judge_interfaces(verdicts, answers, "ens1")
        assert {n: v.reasons for n, v in verdicts.items() if v.is_bad} == {"n3": [said]}


def fabric(moved: dict[str, int], counters: list[str]) -> tuple[dict[str, Any], verdict.Verdict]:
    verdicts = {"n0": verdict.Verdict("n0"), "n1": verdict.Verdict("n1")}
    quiet = {"counters": counters, "moved": {}}
    found = verdict.judge_fabric(verdicts, {"n0": quiet, "n1": {"counters": counters, "moved": moved}})
    return found, verdicts["n1"]


ROCE = ["mlx5_0:1/out_of_sequence", "ens1/rx_prio3_pause", "ens1/kernel.rx_errors", "tcp/retransmitted"]


def test_pauses_without_losses_are_a_lossless_fabric_at_work() -> None:
    found, node = fabric({"ens1/rx_prio3_pause": 900}, ROCE)
    assert found["lossless"] is True and "900" in found["why"] and not node.is_bad


def test_lost_packets_are_told_with_node_and_counter() -> None:
    found, node = fabric({"mlx5_0:1/out_of_sequence": 7, "ens1/rx_prio3_pause": 900}, ROCE)
    assert found["lossless"] is False and "n1 mlx5_0:1/out_of_sequence +7" in found["why"]
    assert not node.is_bad  # the fabric's fault, or any node's


def test_damaged_packets_are_the_fault_of_the_nodes_cable() -> None:
    _, node = fabric({"ens1/rx_crc_errors_phy": 3}, ROCE)
    assert node.reasons == ["ens1/rx_crc_errors_phy +3 while data crossed"]


def test_without_counters_of_cards_it_is_not_known() -> None:
    found, _ = fabric({"tcp/retransmitted": 5}, ["ens1/kernel.rx_errors", "tcp/retransmitted"])
    assert found["lossless"] is None and "TCP sent 5 segments again" in found["why"]
