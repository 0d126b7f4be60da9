"""Where the ranks meet: a port that is free, an address that the others can reach."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hpctrain.errors import ClusterError
from hpctrain.launch.network import ephemeral_range, free_port, head_address, interface_towards
from hpctrain.slurm import NodeInfo


def test_ports_are_free_and_outside_the_range_of_clients() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert ephemeral_range() == (low, high)
    for _ in range(20):
        port = free_port()
        assert 1024 < port < 65536 and not low <= port <= high
        with socket.socket() as listener:
            listener.bind(("", port))
            listener.listen()


def test_ports_differ_from_start_to_start() -> None:
    assert len({free_port() for _ in range(20)}) > 10


def test_a_port_that_somebody_listens_on_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_port(), free_port()
    assert taken != free
    monkeypatch.setattr("random.SystemRandom.sample", lambda self, population, k: [taken, free])
    with socket.socket() as listener:
        listener.bind(("", taken))
        listener.listen()
        assert free_port() == free


def node(name: str, address: str) -> NodeInfo:
    return NodeInfo(
        name=name,
        state="ALLOCATED",
        address=address,
        hostname=name,
        gres="",
        num_cpus=8,
        memory_mib=1,
        reason="",
    )


NODES = [node("n0", "10.0.0.1"), node("n1", "10.0.0.2")]


def resolver(**table: str):  # type: ignore[no-untyped-def]
    """Resolves the names in the table and addresses; raises OSError for the rest, as the system does."""

    def resolve(name: str) -> str:
        if name in table:
            return table[name]
        if name[0].isdigit():
            return name
        raise socket.gaierror(f"{name}: not known")

    return resolve


def test_a_name_that_resolves_is_taken() -> None:
    assert head_address(NODES, resolver(n0="10.9.9.9")) == "10.9.9.9"


def test_a_name_that_means_this_host_falls_back_to_node_addr() -> None:
    assert head_address(NODES, resolver(n0="127.0.1.1")) == "10.0.0.1"


def test_a_name_that_does_not_resolve_falls_back_to_node_addr() -> None:
    assert head_address(NODES, resolver()) == "10.0.0.1"


def test_with_debians_own_names_the_way_to_the_second_node_tells_our_address() -> None:
    """The head's name and its NodeAddr both mean 127.0.1.1 to itself; the others are known by address."""
    second = "192.0.2.7"  # TEST-NET-1, RFC 5737: routed, never reached
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((second, 9))
        except OSError:
            pytest.skip("this machine has no route to other networks")
        own = probe.getsockname()[0]
    assert head_address([node("n0", "n0"), node("n1", second)], resolver(n0="127.0.1.1")) == own


def test_one_node_may_use_its_loopback() -> None:
    assert head_address(NODES[:1], resolver(n0="127.0.1.1")) == "127.0.1.1"


def test_nodes_that_all_live_on_one_host_may_use_its_loopback() -> None:
    nodes = [node("n0", "127.0.0.1"), node("n1", "127.0.0.1")]
    assert head_address(nodes, resolver()) == "127.0.0.1"


@pytest.mark.parametrize(
    ("head", "table", "words"),
    [
        (node("n0", "n0"), {}, ["n0 does not resolve"]),
        (node("n0", "127.0.0.1"), {"n0": "127.0.1.1"}, ["n0 is 127.0.1.1", "127.0.0.1 is 127.0.0.1"]),
        (node("n0", "127.0.0.1"), {}, ["n0 does not resolve", "other nodes cannot reach"]),
    ],
)
def test_no_address_that_others_reach_is_refused_with_what_was_tried(
    head: NodeInfo, table: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ClusterError) as refusal:
        head_address([head, node("n1", "n1")], resolver(**table))  # the second node does not resolve either
    assert [word for word in words if word not in refusal.value.found] == []
    assert "NodeAddr" in refusal.value.change


def test_loopback_is_reached_through_lo() -> None:
    assert interface_towards("127.0.0.1") == "lo"


def test_an_address_without_a_route_has_no_interface() -> None:
    assert interface_towards("not an address") is None
