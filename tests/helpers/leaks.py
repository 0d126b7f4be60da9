"""What a test may leave behind: variables, processes, a process group, shared memory."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.polling import wait_until
from tests.helpers.processes import children, environment, kill
from tests.helpers.sandbox import MARK

_SHARED_MEMORY = Path("/dev/shm")
# Set by libraries when they are imported or first used, and by pytest.
_LIBRARY_VARIABLES = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_", "KMP_")
_SETTLE_S = 2.0


@dataclass
class Surroundings:
    """The state of the process before a test."""

    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    children: set[int] = field(default_factory=lambda: children(os.getpid()))
    segments: set[str] = field(default_factory=lambda: set(os.listdir(_SHARED_MEMORY)))

    def leaks(self) -> list[str]:
        """What is there now and was not before; removes it, so that it is reported once."""
        return [*self._variables(), *self._process_group(), *self._processes(), *self._segments()]

    def _variables(self) -> list[str]:
        now = dict(os.environ)
        names = sorted(name for name in now.keys() | self.env.keys() if now.get(name) != self.env.get(name))
        names = [name for name in names if not name.startswith(_LIBRARY_VARIABLES)]
        for name in names:
            os.environ.pop(name, None)
            if name in self.env:
                os.environ[name] = self.env[name]
        return [f"environment variable {name}" for name in names]

    def _process_group(self) -> list[str]:
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return []
        distributed.destroy_process_group()
        return ["an initialised process group"]

    def _processes(self) -> list[str]:
        def left() -> set[int]:
            return {pid for pid in children(os.getpid()) - self.children if not _is_shared(pid)}

        with contextlib.suppress(TimeoutError):  # loader workers and the like may be on their way out
            wait_until(lambda: not left(), _SETTLE_S, "children are gone", 0.01)
        leaks = [f"process {pid}: {_command_line(pid)[:200]}" for pid in sorted(left())]
        kill(left())
        return leaks

    def _segments(self) -> list[str]:
        def left() -> list[str]:
            return sorted(set(os.listdir(_SHARED_MEMORY)) - self.segments)

        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not left(), _SETTLE_S, "segments are gone", 0.01)
        leaks = [name for name in left() if not _is_mapped_elsewhere(name)]
        for name in leaks:
            (_SHARED_MEMORY / name).unlink(missing_ok=True)
        return [f"/dev/shm/{name}" for name in leaks]


def _is_shared(pid: int) -> bool:
    """Whether a child serves the whole session: a daemon of the sandbox, Python's resource tracker."""
    return MARK in environment(pid) or "multiprocessing.resource_tracker" in _command_line(pid)


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _is_mapped_elsewhere(name: str) -> bool:
    """Whether a process that is not this one uses the segment: then it is not ours."""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if int(path.parent.name) != os.getpid() and f"/dev/shm/{name}" in path.read_text():
                return True
    return False
