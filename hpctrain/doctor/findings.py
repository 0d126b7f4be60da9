"""What `doctor` finds: what is, what it means for a run, what to ask or change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How much a finding matters, most first."""

    problem = "problem"  # stops a run, or loses its work
    question = "question"  # could not be learned
    notice = "notice"  # worth knowing: a run goes on all the same
    ok = "ok"


MARKS = {Level.problem: "✗", Level.question: "?", Level.notice: "!", Level.ok: "✓"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact of the cluster, judged for one run."""

    level: Level
    topic: str  #: the setting or the resource
    found: str
    means: str = ""
    change: str = ""  #: in the config, or to ask the administrator

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def problem(topic: str, found: str, means: str, change: str) -> Finding:
    return Finding(Level.problem, topic, found, means, change)


def question(topic: str, found: str, means: str = "", change: str = "") -> Finding:
    return Finding(Level.question, topic, found, means, change)


def notice(topic: str, found: str, means: str, change: str = "") -> Finding:
    return Finding(Level.notice, topic, found, means, change)


def ok(topic: str, found: str, means: str = "") -> Finding:
    return Finding(Level.ok, topic, found, means)


def by_level(findings: Sequence[Finding]) -> list[Finding]:
    """Most important first, else in the order of looking."""
    order = list(Level)
    return sorted(findings, key=lambda finding: order.index(finding.level))


def has_problem(findings: Sequence[Finding]) -> bool:
    return any(finding.level is Level.problem for finding in findings)


def to_text(findings: Sequence[Finding]) -> str:
    """Findings for a terminal; what is as it should be takes one line."""
    lines = []
    for finding in by_level(findings):
        head = f"{MARKS[finding.level]} {finding.topic}: {finding.found}"
        if finding.level is Level.ok:
            lines.append(f"{head}; {finding.means}" if finding.means else head)
            continue
        lines.append(head)
        lines += [f"    means  {finding.means}"] if finding.means else []
        lines += [f"    try    {finding.change}"] if finding.change else []
    return "\n".join(lines)


def summary(findings: Sequence[Finding]) -> str:
    """`2 problems, 1 question, 3 notices, 14 ok`."""
    counts = [(sum(finding.level is level for finding in findings), level) for level in Level]
    words = [f"{n} {level}{'s' if n != 1 and level is not Level.ok else ''}" for n, level in counts if n]
    return ", ".join(words)
