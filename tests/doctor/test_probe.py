from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.doctor import counters, links, matmul, node_facts, probe
from hpctrain.launch.network import free_port


def test_a_product_with_one_wrong_entry_is_found() -> None:
    a, b, expected = matmul.make_pair(64, torch.device("cpu"))
    product = (a.float() @ b.float()).half()
    assert matmul.is_right(product, expected)
    for place in ((0, 0), (63, 63), (17, 40)):
        wrong = product.clone()
        wrong[place] += 1
        assert not matmul.is_right(wrong, expected)


def test_devices_are_busy_together_and_a_broken_one_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy = [torch.device("cpu")] * 2
    assert [each["wrong"] for each in matmul.check_devices(healthy, size=64, busy_s=0.0)] == [0, 0]
    assert capsys.readouterr().out.splitlines() == ["GPU 0", "GPU 1", "busy"]
    made = matmul.make_pair
    broken = iter([False, True])

    def make_pair(size: int, device: torch.device) -> Any:
        a, b, (rows, weights) = made(size, device)
        return a, b, (rows + next(broken), weights)

    monkeypatch.setattr(matmul, "make_pair", make_pair)
    found = matmul.check_devices(healthy, size=64, busy_s=0.0)
    assert [each["wrong"] for each in found] == [0, 2]  # of 20 products two are looked at


def child(folder: Path, script: str) -> str:
    """An interpreter that is none: it answers as the child would."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "error", "num_gpus"),
    [
        ('echo busy; echo \'[{"device": 0, "wrong": 0, "tflops": 150.0}]\'', None, 1),
        ("echo '[]'", "torch finds no GPU", 0),
        (
            "echo busy; echo 'CUDA error: unspecified launch failure' >&2; exit 1",
            "CUDA error: unspecified",
            0,
        ),
        ("echo 'No module named torch' >&2; exit 1", "No module named torch", 0),
    ],
    ids=["well", "no GPU", "dies while busy", "no torch"],
)
def test_a_child_that_fails_is_an_answer_too(
    script: str, error: str | None, num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe.sys, "executable", child(tmp_path, script))
    monkeypatch.setattr(probe, "BUSY_AFTER_S", 0.0)
    monkeypatch.setattr(probe.gpus, "query_gpus", lambda: ([{"index": 0, "pcie_gen": 4}], ""))
    found, _ = probe.try_gpus()
    assert len(found["gpus"]) == num_gpus
    assert found["error"] is None if error is None else found["error"].startswith(error)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo 'GPU 0'; echo 'GPU 1'; exec sleep 60", "GPU 1 did not start within 0.5 s"),
        ("exec sleep 60", "torch did not start within 0.5 s"),
        ("echo 'GPU 0'; echo busy; exec sleep 60", "no answer within 0.5 s"),
    ],
    ids=["a GPU hangs", "torch hangs", "the products hang"],
)
def test_a_child_that_hangs_is_named_in_time(
    script: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe.sys, "executable", child(tmp_path, script))
    for name, seconds in (("BUSY_AFTER_S", 0.0), ("START_S", 0.5), ("MATMUL_S", 0.5)):
        monkeypatch.setattr(probe, name, seconds)
    monkeypatch.setattr(probe.gpus, "query_gpus", lambda: ([], ""))
    begun = time.monotonic()
    assert probe.try_gpus()[0] == {"error": error, "gpus": []}
    assert time.monotonic() - begun < 20


def test_a_child_that_complains_at_length_gets_to_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe holds 64 KiB (pipe(7)); who writes more waits for a reader."""
    script = "head -c 200000 /dev/zero >&2; echo busy; echo '[]'"
    monkeypatch.setattr(probe.sys, "executable", child(tmp_path, script))
    for name, seconds in (("BUSY_AFTER_S", 0.0), ("START_S", 10.0)):
        monkeypatch.setattr(probe, name, seconds)
    monkeypatch.setattr(probe.gpus, "query_gpus", lambda: ([], ""))
    assert probe.try_gpus()[0] == {"error": None, "gpus": []}


def test_sums_stay_where_fp16_is_exact() -> None:
    a, b, _ = matmul.make_pair(matmul.SIZE // 8, torch.device("cpu"))
    # The standard deviation of a sum of n terms, each ±1 four times in nine, is 2/3 of √n.
    assert float((a.float() @ b.float()).abs().max()) < 2048 / 8**0.5


def test_the_cpus_checksum_is_that_of_zeros() -> None:
    assert hashlib.sha256(b"\0" * 2**24).hexdigest() == matmul.ZEROS_SHA256
    assert matmul.check_cpu()["is_right"]


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    found = probe.try_disk(tmp_path / "missing")
    assert found["error"] and found["write_gbps"] is None
    good = probe.try_disk(tmp_path)
    assert good["error"] is None and good["write_gbps"] > 0 and good["read_gbps"] > 0
    assert list(tmp_path.iterdir()) == []


def measured(nodes: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}

    def one(name: str) -> None:
        found[name] = links.measure_links(nodes, name, 0.1)

    threads = [threading.Thread(target=one, args=(node["node"],)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_three_nodes_measure_every_link_in_both_directions() -> None:
    nodes = [{"node": f"n{n}", "address": "127.0.0.1", "port": free_port()} for n in range(3)]
    found = [link for each in measured(nodes).values() for link in each]
    ends = {(link["from"], link["to"]) for link in found}
    assert ends == {(a, b) for a in ("n0", "n1", "n2") for b in ("n0", "n1", "n2") if a != b}
    assert all(link["error"] is None and link["gbps"] > 0 for link in found)


def test_bytes_count_when_the_other_side_has_them() -> None:
    with links.Receiver(0, 1) as receiver:
        sent, seconds = links.send("127.0.0.1", receiver.port, 0.05, time.monotonic() + 10)
    assert sent > 0 and sent % len(links.CHUNK) == 0 and seconds >= 0.05


def test_a_peer_that_is_not_there_is_an_error_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CONNECT_S", 0.3)
    with socket.socket() as unused:  # bound and not listening
        unused.bind(("127.0.0.1", 0))
        found = links.measure_link("127.0.0.1", unused.getsockname()[1], 0.1)
    assert found["gbps"] is None and "refused" in found["error"]


# `ethtool -S` of an mlx5 card, shortened.
ETHTOOL = """\
NIC statistics:
     rx_packets: 1234
     rx_out_of_buffer: 5
     rx_crc_errors_phy: 0
     rx_prio3_pause: 900
     tx_discards_phy: 2
     rx_prio3_pause_duration: 77
     rx_steer_missed_packets: 11
"""


def test_counters_of_a_card_are_sorted_into_losses_and_pauses() -> None:
    found = counters.parse_ethtool(ETHTOOL)
    assert "rx_packets" not in found and found["rx_prio3_pause"] == 900
    assert {name for name in found if counters.is_loss(name)} >= {
        "rx_out_of_buffer",
        "rx_crc_errors_phy",
        "tx_discards_phy",
    }
    assert not counters.is_loss("rx_prio3_pause") and counters.is_pause("rx_prio3_pause")


def test_counters_are_read_from_sysfs_and_proc(tmp_path: Path) -> None:
    files = {
        "sys/class/infiniband/mlx5_0/ports/1/hw_counters/out_of_sequence": "4",
        "sys/class/infiniband/mlx5_0/ports/1/hw_counters/rx_read_requests": "9",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_errors": "1",
        "sys/class/net/ens1/statistics/rx_crc_errors": "2",
        "sys/class/net/ens1/statistics/rx_dropped": "3",
        "proc/net/snmp": "Tcp: RtoMin RetransSegs InErrs\nTcp: 200 12 0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = counters.read_counters("ens1", tmp_path / "sys", tmp_path / "proc")
    assert found == {
        "mlx5_0:1/out_of_sequence": 4,
        "mlx5_0:1/port_rcv_errors": 1,
        "ens1/kernel.rx_crc_errors": 2,
        "tcp/retransmitted": 12,
    }
    assert counters.moved(found, {**found, "tcp/retransmitted": 15}) == {"tcp/retransmitted": 3}


def test_rdma_ports_tell_the_index_of_roce_v2_over_ipv4(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    files = {"state": "4: ACTIVE", "rate": "25 Gb/sec (1X EDR)", "link_layer": "Ethernet"}
    gids = ["fe80:0000:0000:0000:0000:0000:0000:0001"] * 2 + ["0000:0000:0000:0000:0000:ffff:0a00:0001"] * 2
    for index, gid in enumerate(gids):
        files[f"gids/{index}"] = gid
        files[f"gid_attrs/types/{index}"] = "RoCE v2" if index % 2 else "IB/RoCE v1"
    files["gids/4"] = "0000:0000:0000:0000:0000:0000:0000:0000"
    for name, text in files.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(text + "\n")
    (found,) = node_facts.rdma_ports(tmp_path)
    assert (found["device"], found["state"], len(found["gids"])) == ("mlx5_0", "ACTIVE", 4)
    assert node_facts.gid_index([found]) == 3
    other = {**found, "gids": [{"index": 5, "gid": gids[3], "type": "RoCE v2"}]}
    assert node_facts.gid_index([found, other]) is None


def test_a_path_lies_on_the_longest_mount_point_above_it() -> None:
    mounts = "rootfs / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\n/dev/x /home/a\\040b xfs rw 0 0\n"
    assert node_facts.mount_type(Path("/home/an/runs"), mounts) == "nfs4"
    assert node_facts.mount_type(Path("/home/a b/c"), mounts) == "xfs"
    assert node_facts.mount_type(Path("/homes"), mounts) == "ext4"


def test_a_nodes_answer_lies_in_the_folder_whole(tmp_path: Path) -> None:
    assert probe.main(["facts", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert path.name.endswith(".facts.json")
    assert {
        "driver",
        "torch",
        "nics",
        "memlock_bytes",
        "shm_gib",
        "scratch",
        "run_folder",
        "port",
    } <= found.keys()
    assert found["torch"]["version"] == torch.__version__
