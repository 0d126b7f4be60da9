"""In words: how a run lies beside its plan."""

from __future__ import annotations

from typing import Any

WAITS = 0.05  # share of a step that is worth a word
MEMORY = 0.05  # relative


def drift_lines(compared: dict[str, Any]) -> list[str]:
    """What a `compared` event of the ledger says, a line each; the first one is always there."""
    low, mid, high = compared["planned_step_s"]
    step = compared["step_s"]
    verdict = "as planned"
    if step > high:
        verdict = f"{step / mid - 1:.0%} slower than planned"
    elif step < low:
        verdict = f"{1 - step / mid:.0%} faster than planned"
    lines = [f"{step:.3g} s a step, {verdict} ({low:.3g}–{high:.3g})"]
    wait = compared["data_wait"]
    if wait > compared["planned_data_wait"] + WAITS:
        lines.append(f"waits for data {wait:.0%} of the time, planned {compared['planned_data_wait']:.0%}")
    if "memory_gib" in compared:
        memory, planned = compared["memory_gib"], compared["planned_memory_gib"]
        if abs(memory / planned - 1) > MEMORY:
            lines.append(f"takes {memory:.1f} GiB on rank 0, planned {planned:.1f}")
    return lines
