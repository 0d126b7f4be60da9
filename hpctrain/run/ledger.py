"""The ledger: one JSON line per event of a run. What the run is known to have done is read from here.

Events and who writes them: `frozen` (login node, before a job exists); `start`, `end` (supervisor);
`restored`, `saved`, `damaged` (rank 0), in a selftest also `selftest`, `begun`, `checked`. Rank 0 and the
supervisor share the head node, so appends do not interleave.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One launch of the ranks as the ledger tells it. Steps count finished optimizer steps."""

    name: str
    start: Event
    end: Event | None
    restored_step: int | None
    saved_step: int | None

    @property
    def progressed(self) -> bool:
        """Whether the run stands further after this attempt than before it."""
        return self.saved_step is not None and self.saved_step > (self.restored_step or 0)


class Ledger:
    """Append and read. A torn last line (a node lost in mid-write) is skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), **facts}, sort_keys=True) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if self._torn():
                line = "\n" + line
            os.write(descriptor, line.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _torn(self) -> bool:
        with self.path.open("rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            if size == 0:
                return False
            handle.seek(size - 1)
            return handle.read(1) != b"\n"

    def events(self) -> list[Event]:
        if not self.path.exists():
            return []
        events = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(event, dict) and "event" in event:
                events.append(event)
        return events

    def attempts(self) -> list[Attempt]:
        """All attempts in order of their start."""
        events = self.events()
        attempts = []
        for start in (e for e in events if e["event"] == "start"):
            own = [e for e in events if e.get("attempt") == start["attempt"]]
            restored = [e["step"] for e in own if e["event"] == "restored"]
            saved = [e["step"] for e in own if e["event"] == "saved"]
            ends = [e for e in own if e["event"] == "end"]
            attempts.append(
                Attempt(
                    name=start["attempt"],
                    start=start,
                    end=ends[-1] if ends else None,
                    restored_step=restored[-1] if restored else None,
                    saved_step=saved[-1] if saved else None,
                )
            )
        return attempts

    def since_frozen(self) -> list[Attempt]:
        """Attempts since a person last sent the run: those that count against its budgets."""
        events = self.events()
        frozen = max((i for i, e in enumerate(events) if e["event"] == "frozen"), default=-1)
        # By the order of lines: clocks of login node and batch host differ.
        recent = {e["attempt"] for e in events[frozen + 1 :] if e["event"] == "start"}
        return [attempt for attempt in self.attempts() if attempt.name in recent]

    def last(self, event: str) -> Event | None:
        found = [e for e in self.events() if e["event"] == event]
        return found[-1] if found else None
