"""Ranks run on the CPUs near their GPU, of those that Slurm allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.launch.binding import bound_cpus, cpus_near, parse_cpulist, pci_address

FIRST, SECOND, NOWHERE = "0000:01:00.0", "0000:c1:00.0", "0000:e1:00.0"


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """The part of sysfs that matters, of a board with 2 sockets of 4 cores and hyperthreads."""
    for address, node in ((FIRST, 0), (SECOND, 1), (NOWHERE, -1)):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", {0, 1, 2, 3, 8}), ("5\n", {5}), ("", set()), ("0,2,4-5\n", {0, 2, 4, 5})]
)
def test_a_list_of_cpus_is_read_as_the_kernel_writes_it(text: str, cpus: set[int]) -> None:
    assert parse_cpulist(text) == cpus


def test_an_address_is_written_as_in_sysfs() -> None:
    assert pci_address(0, 0xC1, 0) == SECOND
    assert pci_address(0x10000, 1, 31) == "10000:01:1f.0"


def test_a_rank_runs_near_its_gpu(two_sockets: Path) -> None:
    everything = set(range(16))
    assert bound_cpus(everything, FIRST, two_sockets) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert bound_cpus(everything, SECOND, two_sockets) == {4, 5, 6, 7, 12, 13, 14, 15}


def test_a_rank_takes_no_cpu_that_slurm_gave_to_others(two_sockets: Path) -> None:
    assert bound_cpus({2, 3, 4, 5}, SECOND, two_sockets) == {4, 5}


def test_a_rank_with_far_cpus_alone_keeps_them(two_sockets: Path) -> None:
    assert bound_cpus({0, 1}, SECOND, two_sockets) == {0, 1}


@pytest.mark.parametrize("address", [NOWHERE, "0000:ff:00.0"])
def test_a_rank_whose_gpu_is_near_no_node_keeps_its_cpus(two_sockets: Path, address: str) -> None:
    assert cpus_near(address, two_sockets) == set()
    assert bound_cpus({0, 9}, address, two_sockets) == {0, 9}
