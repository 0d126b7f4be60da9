"""Processes of this machine, found by what /proc says of them; free ports."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def start_time(pid: int) -> str:
    """When the process started, in clock ticks since boot; "" when it does not run."""
    return _stat(pid)[19] if is_running(pid) else ""


def environment(pid: int) -> dict[str, str]:
    """What the process was started with; empty when it is gone or another user's."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    return {}


def find_processes(is_wanted: Callable[[dict[str, str]], bool]) -> set[int]:
    """Processes whose initial environment `is_wanted`, with all their descendants; never this one."""
    found = [pid for pid in _pids() if is_wanted(environment(pid))]
    return (_descendants(found) | set(found)) - {os.getpid()}


def children(pid: int) -> set[int]:
    """What this process has started itself and still runs."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found.update(map(int, path.read_text().split()))
    return {child for child in found if is_running(child)}


def has_open(pid: int, path: Path) -> bool:
    """Whether the process has the file open."""
    with contextlib.suppress(OSError):
        return str(path) in {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    return False


def kill(pids: set[int]) -> set[int]:
    """Sends SIGKILL; returns those that were still alive."""
    alive = {pid for pid in pids if is_running(pid)}
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return alive


def is_listening(port: int) -> bool:
    """Whether something on this machine accepts connections on the TCP port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> list[int]:
    """Distinct free TCP ports below the ephemeral range (where a client's own port may take them)."""
    found: list[int] = []
    while len(found) < count:
        port = 10_000 + secrets.randbelow(20_000)
        if port not in found and not is_listening(port):
            found.append(port)
    return found


def _pids() -> list[int]:
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_running(pid)]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on, proc(5); empty when there is no such process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _descendants(roots: Iterable[int]) -> set[int]:
    """What these processes have started, and what that has started; not the roots, not zombies."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        children.setdefault(_parent(pid), []).append(pid)
    closure: set[int] = set()
    todo = list(roots)
    while todo:
        fresh = [pid for pid in children.get(todo.pop(), []) if pid not in closure]
        closure.update(fresh)
        todo += fresh
    return closure
