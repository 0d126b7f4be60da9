"""The table of a selftest, read from the ledger of its run. No torch.

Rank 0 writes `selftest` (what will be checked, and where), `begun` and `checked`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.run.causes import STOPPED_BY_AGREEMENT, CauseKind
from hpctrain.run.ledger import Event, Ledger

# Ends that say nothing against the check that was under way.
_BLAMELESS = {*STOPPED_BY_AGREEMENT, CauseKind.lost, CauseKind.node_failure}
UNDISTURBED = "a run from beginning to end"
PREEMPTED = "the same run, preempted and gone on with"
PLACE = ("device", "ranks", "nodes", "torch", "backend")


@dataclass(frozen=True)
class Row:
    """A check. `error` is empty when it passed, None when it has not been carried out to its end."""

    check: str
    error: str | None = None
    seconds: float = 0.0

    def text(self) -> str:
        word = {None: "not done", "": "ok"}.get(self.error, "ERROR")
        return f"{word:<9}{self.seconds:6.1f} s  {self.check}" + (f"\n  {self.error}" if self.error else "")


def read_rows(ledger: Ledger) -> list[Row]:
    """What is known of every check. One that ended its ranks (a crash, a hang) has failed with that cause."""
    events = ledger.events()
    last = ledger.last("selftest")
    checked = {e["check"]: e for e in events if e["event"] == "checked"}
    begun = {e["check"]: e for e in events if e["event"] == "begun"}
    ends = {attempt.name: attempt.end for attempt in ledger.attempts()}
    return [_row(name, checked.get(name), begun.get(name), ends) for name in (last["checks"] if last else [])]


def _row(name: str, checked: Event | None, begun: Event | None, ends: dict[str, Event | None]) -> Row:
    if checked is not None:
        return Row(name, checked["error"], checked["seconds"])
    end = ends.get(begun["attempt"]) if begun is not None else None
    if begun is None or end is None or end["cause"] in _BLAMELESS:
        return Row(name)
    return Row(name, f"it ended the ranks: {end['cause']}: {end['message']}", end["time"] - begun["time"])


def is_passed(rows: list[Row]) -> bool:
    return bool(rows) and all(row.error == "" for row in rows)


def facts(ledger: Ledger) -> dict[str, Any]:
    """The table and where it was made, as JSON values."""
    rows = read_rows(ledger)
    where = ledger.last("selftest") or {}
    known = {key: value for key, value in where.items() if key in PLACE}
    return {"passed": is_passed(rows), **known, "checks": [asdict(row) for row in rows]}


def text(ledger: Ledger) -> str:
    """The table for a terminal."""
    rows, where = read_rows(ledger), ledger.last("selftest")
    if where is None:
        return "selftest: no check was begun"
    counts = f"{sum(row.error == '' for row in rows)} of {len(rows)} checks passed"
    place = f"{where['ranks']} ranks on {where['nodes']} nodes, {where['device']}"
    lines = [f"selftest: {place}, torch {where['torch']}, {where['backend']}", *(row.text() for row in rows)]
    return "\n".join([*lines, f"selftest: {counts}" + ("" if is_passed(rows) else ": NOT PASSED")])
