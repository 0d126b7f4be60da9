"""The address and port at which the ranks find each other."""

from __future__ import annotations

import ipaddress
import random
import socket
from collections.abc import Callable
from pathlib import Path

from hpctrain.errors import ClusterError
from hpctrain.slurm import NodeInfo

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def ephemeral_range() -> tuple[int, int]:
    """Ports that the kernel hands out to clients: one of them may be taken at any moment."""
    if _RANGE.exists():
        low, high = map(int, _RANGE.read_text().split())
        return low, high
    return 32768, 60999


def free_port() -> int:
    """A port of this host that nobody listens on, outside the ephemeral range, another one each time."""
    low, high = ephemeral_range()
    candidates = [port for port in range(10000, 65000) if not low <= port <= high]
    for port in random.SystemRandom().sample(candidates, min(200, len(candidates))):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ClusterError("no free port on the head node", f"tried 200 ports outside {low}-{high}")


def head_address(nodes: list[NodeInfo], resolve: Callable[[str], str] = socket.gethostbyname) -> str:
    """Where the other nodes reach the first one, on which we are: its name if it resolves to an address that
    others can use (Debian resolves a host's own name to 127.0.1.1), what Slurm knows as its NodeAddr, or our
    own address on the way to the second node. Raises ClusterError if none can work."""
    head = nodes[0]
    shared_host = all(_is_loopback(node.address) for node in nodes)
    found = []
    for candidate in (head.name, head.address):
        try:
            address = resolve(candidate)
        except OSError:
            found.append(f"{candidate} does not resolve")
            continue
        if not _is_loopback(address) or len(nodes) == 1 or shared_host:
            return address
        found.append(f"{candidate} is {address}, which other nodes cannot reach")
    own = own_address_towards(nodes[1].address, resolve)
    if own is not None and not _is_loopback(own):
        return own
    raise ClusterError(
        f"the ranks need the address of node {head.name}",
        "; ".join(found),
        "ask the administrator for a NodeAddr that other nodes can reach",
    )


def own_address_towards(host: str, resolve: Callable[[str], str] = socket.gethostbyname) -> str | None:
    """This host's own address on the way to another one; None if that cannot be reached. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((resolve(host), 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def interface_towards(address: str) -> str | None:
    """Name of the network interface through which this host reaches `address`, None if unknown.

    Gloo otherwise takes whatever the host's own name resolves to, often 127.0.1.1.
    """
    import fcntl
    import struct

    own = own_address_towards(address)
    if own is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(
                    probe.fileno(), 0x8915, struct.pack("256s", name[:15].encode())
                )  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(reply[20:24]) == own:
                return name
    return None
