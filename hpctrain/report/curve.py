"""Time of a run against the number of nodes: the expected time, its range as a band, and the deadline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from hpctrain.plan.durations import DAY_S
from hpctrain.plan.sizing import Size
from hpctrain.plan.uncertainty import Interval
from hpctrain.report.markup import Drawing, label, line, tag, text_px, ticks

HOUR_S = 3600.0
MOST_DECADES = 0.6  # of ten; what spans more has a logarithmic scale


def known_times(sizes: Sequence[Size]) -> list[tuple[int, Interval]]:
    """Numbers of nodes whose time is known."""
    return [
        (size.num_nodes, size.forecast.elapsed_s)
        for size in sizes
        if size.forecast is not None and size.forecast.elapsed_s is not None
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plane:
    """Where nodes and times lie in a picture."""

    left: float
    right: float
    top: float
    bottom: float
    nodes: tuple[int, int]
    times: tuple[float, float]
    unit_s: float
    is_logarithmic: bool

    def x(self, nodes: float) -> float:
        low, high = self.nodes
        return self.left + (self.right - self.left) * (nodes - low + 0.5) / (high - low + 1)

    def y(self, seconds: float) -> float:
        low, high, value = *self.times, seconds
        if self.is_logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(seconds)
        return self.bottom - (self.bottom - self.top) * (value - low) / (high - low)

    @property
    def unit(self) -> str:
        return "days" if self.unit_s == DAY_S else "hours" if self.unit_s == HOUR_S else "minutes"


def draw_curve(width: float, sizes: Sequence[Size], deadline_s: float | None, own_nodes: int) -> Drawing:
    """The curve of a picture of that width.

    Args:
        own_nodes: of the run that the page is about.
    """
    known = known_times(sizes)
    height = 320.0 if width > 500 else 260.0
    plane = _plane(width, height, sizes, known, deadline_s)
    shapes = _axes(plane, width)
    if len(known) > 1:
        upper = [f"{plane.x(nodes):.1f},{plane.y(time.high):.1f}" for nodes, time in known]
        lower = [f"{plane.x(nodes):.1f},{plane.y(time.low):.1f}" for nodes, time in reversed(known)]
        middle = [f"{plane.x(nodes):.1f},{plane.y(time.mid):.1f}" for nodes, time in known]
        shapes.append(tag("polygon", points=" ".join(upper + lower), class_="band"))
        shapes.append(tag("polyline", points=" ".join(middle), class_="curve"))
    for nodes, time in known:
        x = plane.x(nodes)
        shapes.append(line(x, plane.y(time.low), x, plane.y(time.high), "whisker"))
        own = " own" if nodes == own_nodes else ""
        dot = tag("circle", cx=x, cy=plane.y(time.mid), r=6.0 if own else 3.5, class_=f"dot{own}")
        dot.set("data-nodes", str(nodes))
        dot.set("data-seconds", f"{time.mid:.1f}")
        shapes.append(dot)
    for size in sizes:
        if size.plan is None:
            shapes.append(label(plane.x(size.num_nodes), plane.bottom - 6, "×", "middle", "refused"))
    if deadline_s is not None:
        y = plane.y(deadline_s)
        shapes.append(line(plane.left, y, plane.right, y, "limit"))
    return height, shapes


def _plane(
    width: float,
    height: float,
    sizes: Sequence[Size],
    known: Sequence[tuple[int, Interval]],
    deadline_s: float | None,
) -> _Plane:
    asked = [deadline_s] if deadline_s is not None else []
    low = min([time.low for _, time in known] + asked)
    high = max([time.high for _, time in known] + asked)
    is_logarithmic = math.log10(high / low) > MOST_DECADES
    return _Plane(
        left=52.0,
        right=width - 6,
        top=26.0,
        bottom=height - 40,
        nodes=(sizes[0].num_nodes, sizes[-1].num_nodes),
        times=(low / 1.25, high * 1.15) if is_logarithmic else (0.0, high * 1.08),
        unit_s=DAY_S if low >= 3 * DAY_S else HOUR_S if high >= 2 * HOUR_S else 60.0,
        is_logarithmic=is_logarithmic,
    )


def _axes(plane: _Plane, width: float) -> list[ET.Element]:
    shapes = [line(plane.left, plane.bottom, plane.right, plane.bottom, "axis")]
    low, high = (second / plane.unit_s for second in plane.times)
    for value in _log_ticks(low, high) if plane.is_logarithmic else ticks(low, high, 6):
        y = plane.y(value * plane.unit_s)
        shapes.append(line(plane.left, y, plane.right, y, "grid"))
        shapes.append(label(plane.left - 6, y + 4, f"{value:,.6g}", "end", "tick"))
    scale = f"{plane.unit} to the end" + (", logarithmic" if plane.is_logarithmic else "")
    shapes.append(label(2, 13, scale, "start", "tick"))
    first, last = plane.nodes
    every = max(1, math.ceil((last - first + 1) * text_px(f"{last} ") / (plane.right - plane.left)))
    for nodes in range(first, last + 1):
        if (nodes - first) % every == 0:
            shapes.append(label(plane.x(nodes), plane.bottom + 15, str(nodes), "middle", "tick"))
    shapes.append(label(width - 6, plane.bottom + 33, "nodes", "end", "tick"))
    return shapes


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [
        factor * 10.0**decade
        for decade in decades
        for factor in (1, 2, 3, 5)
        if low <= factor * 10.0**decade <= high
    ]
