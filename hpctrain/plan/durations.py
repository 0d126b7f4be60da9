"""Lengths of time, as people write and read them."""

from __future__ import annotations

import re

from hpctrain.config.schema import Config
from hpctrain.plan.uncertainty import Interval

DAY_S = 86_400.0


def parse_duration_s(text: str) -> float | None:
    """`36h`, `1d12h`, `90m` in seconds; None for anything else."""
    if not re.fullmatch(r"(\d+(\.\d+)?[dhm])+", text):
        return None
    units = {"d": DAY_S, "h": 3600.0, "m": 60.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([dhm])", text))


def deadline_s(config: Config) -> float | None:
    """The deadline of a run; None where it has none, or one that cannot be read."""
    return parse_duration_s(config.deadline) if config.deadline else None


def duration_text(seconds: float) -> str:
    """`36.0 h`, `4.2 days`, `12 min`."""
    return _in_unit(seconds, seconds)


def range_text(total: Interval) -> tuple[str, str]:
    """A time and its range in the same unit: `3.1 days`, `2.7–4.0 days`."""
    low = _in_unit(total.low, total.mid).split()[0]
    return duration_text(total.mid), f"{low}–{_in_unit(total.high, total.mid)}"


def span_text(total: Interval) -> str:
    """`34.2 h (31.0–38.5 h)`."""
    return "{} ({})".format(*range_text(total))


def _in_unit(seconds: float, like_s: float) -> str:
    """Seconds in the unit that suits another time."""
    if like_s >= 3 * DAY_S:
        return f"{seconds / DAY_S:.1f} days"
    return f"{seconds / 3600:.1f} h" if like_s >= 7200 else f"{seconds / 60:.0f} min"
