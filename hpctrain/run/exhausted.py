"""Where memory ran out: a list beside the runs, so that the next plan refuses what failed before."""

from __future__ import annotations

import json
from pathlib import Path

_NAME = "out_of_memory.jsonl"


def note_out_of_memory(run_root: Path, point: str, *, run: str, attempt: str, message: str) -> None:
    """Add a point (`plan.points.memory_point`) to the list."""
    line = {"point": point, "run": run, "attempt": attempt, "message": message[:200]}
    with (run_root / _NAME).open("a") as handle:
        handle.write(json.dumps(line) + "\n")


def find_out_of_memory(run_root: Path) -> dict[str, str]:
    """Points on the list, and which run it was; to try one again, remove its line."""
    path = run_root / _NAME
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            fields = json.loads(line)
            found[fields["point"]] = f"{fields['run']} ({fields['attempt']})"
        except (json.JSONDecodeError, KeyError, TypeError):
            continue  # a line that was cut off by a full disk
    return found
