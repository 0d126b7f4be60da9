from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.doctor import gpus

# A row of a GeForce card, which has no ECC, and one of a data-centre card, in nvidia-smi's format.
NAMES = list(gpus._QUERIES)
GEFORCE = (
    "0, NVIDIA GeForce RTX 4090, 00000000:01:00.0, 550.54.14, 24564, 12, 34, 210, 3120, 21.33, 450.00, "
    "1, 4, 16, 16, [N/A], 0x0000000000000001\n"
)
H200 = (
    "1, NVIDIA H200, 00000000:1B:00.0, 580.65.06, 143771, 0, 27, 345, 1980, 76.20, 700.00, "
    "5, 5, 16, 16, 3, 0x0000000000000048\n"
)

# `nvidia-smi topo -m` of two sockets with four cards each; the header is underlined with escape codes.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPHB\tSYS\tSYS\tSYS\t0-31\t0\t\tN/A
GPU1\tPHB\t X \tSYS\tSYS\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNODE\tPHB\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNODE\t X \tNODE\t32-63\t1\t\tN/A
NIC0\tSYS\tSYS\tPHB\tNODE\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def test_what_a_card_does_not_tell_is_none() -> None:
    (card,) = gpus.parse_gpus(GEFORCE, NAMES)
    assert (card["name"], card["driver"], card["ecc_uncorrected"]) == (
        "NVIDIA GeForce RTX 4090",
        "550.54.14",
        None,
    )
    assert (card["pcie_gen"], card["max_pcie_gen"], card["pcie_width"], card["power_w"]) == (1, 4, 16, 21.33)


def test_errors_and_reasons_of_slowdowns_are_numbers() -> None:
    (card,) = gpus.parse_gpus(H200, NAMES)
    assert (card["ecc_uncorrected"], card["throttle"]) == (3, 0x48)
    assert gpus.slowdowns(card["throttle"]) == ["hardware slowdown", "hardware thermal slowdown"]
    assert gpus.slowdowns(0x1 | 0x4) == gpus.slowdowns(None) == []  # idle, power cap


def test_the_newest_cuda_of_a_driver_is_in_the_head_of_nvidia_smi() -> None:
    line = "| NVIDIA-SMI 580.65.06              Driver Version: 580.65.06      CUDA Version: 13.0     |\n"
    assert gpus.parse_driver_cuda(line) == "13.0"
    assert gpus.parse_driver_cuda("NVIDIA-SMI has failed") is None


def test_cards_are_grouped_by_what_crosses_no_socket() -> None:
    assert gpus.parse_topology(TOPOLOGY) == [[0, 1], [2, 3]]
    assert gpus.parse_topology(TOPOLOGY.replace("SYS", "NODE")) == [[0, 1, 2, 3]]
    assert gpus.parse_topology("") == []


def fake_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_field_that_an_older_driver_does_not_know_is_asked_for_by_its_older_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = 'Field "clocks_event_reasons.active" is not a valid field to query.'
    script = f"case \"$1\" in *event_reasons*) echo '{refusal}'; exit 2;; esac\nprintf '%s' '{GEFORCE}'"
    fake_nvidia_smi(tmp_path, script, monkeypatch)
    found, why = gpus.query_gpus()
    assert why == "" and found[0]["throttle"] == 1


def test_a_field_that_no_driver_knows_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = 'Field "ecc.errors.uncorrected.volatile.total" is not a valid field to query.'
    row = GEFORCE.replace("[N/A], ", "")
    script = f"case \"$1\" in *ecc.errors*) echo '{refusal}'; exit 2;; esac\nprintf '%s' '{row}'"
    fake_nvidia_smi(tmp_path, script, monkeypatch)
    found, _ = gpus.query_gpus()
    assert "ecc_uncorrected" not in found[0] and found[0]["throttle"] == 1


def test_a_driver_that_does_not_load_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."
    fake_nvidia_smi(tmp_path, f"echo '{said}'; exit 9", monkeypatch)
    assert gpus.query_gpus() == ([], said)


def test_without_nvidia_smi_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.query_gpus() == ([], "nvidia-smi is not installed")
    assert gpus.pcie_roots() == []
