"""Network namespaces joined by links of a known rate, each as a node of its own for a Gloo rank.

    with limited_links(4, rate_bytes_s=25e6) as links:
        run_ranks(4, lambda rank, world: (links.enter(rank), measure()))

Needs root, and iproute2 (`ip`, `tc`). The rate is what leaves a node, by a token bucket (`tc-tbf(8)`); a
bridge in a namespace of its own joins them. Delays are not set: `netem` is missing from many kernels.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000  # sched.h
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

# Of an Ethernet frame of 1514 bytes, which the bucket counts, TCP with timestamps carries 1448.
PAYLOAD = 1448 / 1514


@dataclass(frozen=True)
class Links:
    """Names of the namespaces, one for each rank."""

    names: tuple[str, ...]
    interface: str
    payload_bytes_s: float  #: what a node can send and, at the same time, receive

    def enter(self, rank: int) -> None:
        """Take this thread, and those it starts from now on, into the namespace of a rank."""
        with open(f"/var/run/netns/{self.names[rank]}") as handle:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(handle.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, env={**os.environ, "PATH": PATH})


def missing_links() -> str | None:
    """Why there can be no such links here; None if there can."""
    if not all(shutil.which(program, path=PATH) for program in ("ip", "tc")):
        return "ip and tc are not installed (package iproute2)"
    try:
        with limited_links(1, rate_bytes_s=1e6):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextmanager
def limited_links(num_nodes: int, *, rate_bytes_s: float) -> Iterator[Links]:
    """Make the namespaces; they are gone afterwards."""
    tag = f"hpc{os.getpid()}"
    names, interface = tuple(f"{tag}n{node}" for node in range(num_nodes)), "net0"
    made: list[str] = []
    try:
        for name in (tag, *names):
            _run("ip", "netns", "add", name)
            made.append(name)
        _run("ip", "-n", tag, "link", "add", "hub", "type", "bridge")
        _run("ip", "-n", tag, "link", "set", "hub", "up")
        for node, name in enumerate(names):
            port = f"port{node}"
            pair = ["type", "veth", "peer", "name", port, "netns", tag]
            _run("ip", "link", "add", interface, "netns", name, *pair)
            _run("ip", "-n", tag, "link", "set", port, "master", "hub", "up")
            _run("ip", "-n", name, "addr", "add", f"10.213.0.{node + 1}/24", "dev", interface)
            for each in (interface, "lo"):
                _run("ip", "-n", name, "link", "set", each, "up")
            bucket = ["rate", f"{rate_bytes_s * 8:.0f}bit", "burst", "64kb", "latency", "500ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", interface, "root", "tbf", *bucket)
        yield Links(names, interface, rate_bytes_s * PAYLOAD)
    finally:
        for name in made:
            _run("ip", "netns", "del", name)
