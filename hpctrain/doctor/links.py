"""Bandwidth between nodes over plain TCP: every node sends to a neighbour while another sends to it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from hpctrain.doctor.node_facts import GB

STREAMS = 4  # connections of a link: one core does not fill a fast one
CHUNK = bytes(2**20)
CONNECT_S = 60.0  # nodes start within this time of each other


def offsets(num_nodes: int) -> list[int]:
    """To which neighbours a node sends, one after the other: two tell a slow node from a slow link."""
    return [each for each in (1, 2) if each < num_nodes]


class Receiver:
    """Takes what other nodes send, until as many streams as were announced have ended."""

    def __init__(self, port: int, num_streams: int) -> None:
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("", port))
        self.listener.listen(num_streams)
        self.listener.settimeout(CONNECT_S)
        self.port = int(self.listener.getsockname()[1])
        self.thread = threading.Thread(target=self._accept, args=(num_streams,), daemon=True)

    def __enter__(self) -> Receiver:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join(CONNECT_S)
        self.listener.close()

    def _accept(self, num_streams: int) -> None:
        takers = []
        try:
            for _ in range(num_streams):
                connection, _ = self.listener.accept()
                taker = threading.Thread(target=take, args=(connection,), daemon=True)
                taker.start()
                takers.append(taker)
        except OSError:  # nobody came: the sender tells why
            pass
        for taker in takers:
            taker.join(CONNECT_S)


def take(connection: socket.socket) -> None:
    """Receive to the end, then say how much it was."""
    buffer, total = bytearray(2**20), 0
    with connection:
        connection.settimeout(CONNECT_S)
        try:
            while got := connection.recv_into(buffer):
                total += got
            connection.sendall(total.to_bytes(8, "big"))
        except OSError:
            return


def send(address: str, port: int, seconds: float, deadline: float) -> tuple[int, float]:
    """Send zeros for so long; returns the bytes that arrived and the time it took. Raises OSError."""
    connection = _connect(address, port, deadline)
    with connection:
        connection.settimeout(CONNECT_S)
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            connection.sendall(CHUNK)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while len(answer) < 8:
            part = connection.recv(8 - len(answer))
            if not part:
                raise ConnectionError("the other side ended early")
            answer += part
        return int.from_bytes(answer, "big"), time.monotonic() - begun


def _connect(address: str, port: int, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, port), timeout=5.0)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def measure_link(address: str, port: int, seconds: float) -> dict[str, Any]:
    """GB/s to another node's `Receiver` over all streams, or why there is none."""
    results: list[tuple[int, float]] = []
    errors: list[str] = []
    deadline = time.monotonic() + CONNECT_S

    def one() -> None:
        try:
            results.append(send(address, port, seconds, deadline))
        except OSError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=one, daemon=True) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * CONNECT_S)
    if errors or len(results) < STREAMS:
        return {"gbps": None, "error": errors[0] if errors else "no answer"}
    total, took = sum(sent for sent, _ in results), max(s for _, s in results)
    return {"gbps": round(total / took / GB, 3), "error": None}


def measure_links(nodes: Sequence[dict[str, Any]], own: str, seconds: float) -> list[dict[str, Any]]:
    """This node's part of the measurement: take from those who send to it, send to its neighbours.

    Args:
        nodes: name, address and port of every node, in an order that all share.
    """
    names = [node["node"] for node in nodes]
    position, steps = names.index(own), offsets(len(nodes))
    links = []
    with Receiver(nodes[position]["port"], STREAMS * len(steps)):
        for step in steps:
            peer = nodes[(position + step) % len(nodes)]
            found = measure_link(peer["address"], peer["port"], seconds)
            links.append({"from": own, "to": peer["node"], **found})
    return links
