"""Stacked bars, one below the other, on one scale, with limits as lines across them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from hpctrain.report.markup import Drawing, label, line, rectangle, tag, text_px, ticks

GAP_PX = 6.0
AXIS_PX = 34.0
MOST_LABELS = 24  # bars; of more than that every second, third … is named


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a bar."""

    class_: str
    value: float
    text: str = ""  #: shown where the pointer rests
    count: int | None = None  #: of bytes, where the value is rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row: what it is, its parts, and its value in words."""

    name: str
    pieces: tuple[Piece, ...]
    note: str = ""

    @property
    def total(self) -> float:
        return sum(piece.value for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A value that bars are held against."""

    value: float
    text: str


@dataclass(frozen=True, slots=True)
class _Frame:
    left: float
    right: float
    top: float
    largest: float
    above: bool  #: names have a line of their own

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * value / self.largest


def draw_bars(width: float, bars: Sequence[Bar], axis: str, limits: Sequence[Limit] = ()) -> Drawing:
    """Bars of a picture of that width.

    Args:
        axis: what is on the scale, with its unit.
    """
    names, notes = (
        max(text_px(text) for text in texts)
        for texts in zip(*[(bar.name, bar.note) for bar in bars], strict=True)
    )
    above = names > 0.36 * width
    largest = max([bar.total for bar in bars] + [limit.value for limit in limits]) * 1.02 or 1.0
    left = 2.0 if above else names + 8
    frame = _Frame(left, width - notes - 10, 20.0 if limits else 4.0, largest, above)
    thick = 20.0 if len(bars) <= 8 else 16.0 if len(bars) <= MOST_LABELS else 8.0
    pitch = thick + GAP_PX * (thick > 8) + (16 if above else 0)
    bottom = frame.top + pitch * len(bars)
    shapes = _scale(frame, bottom, width, axis)
    every = -(-len(bars) // MOST_LABELS)
    for index, bar in enumerate(bars):
        shapes.append(_row(frame, bar, frame.top + index * pitch, thick, index % every == 0))
    for limit in limits:
        shapes += _limit(frame, limit, bottom, width)
    for index, bar in enumerate(bars):  # over the limits
        if index % every == 0:
            middle = frame.top + index * pitch + (16 if above else 0) + thick / 2 + 4
            shapes.append(label(frame.x(bar.total) + 6, middle, bar.note, class_="note"))
    return bottom + AXIS_PX, shapes


def _row(frame: _Frame, bar: Bar, y: float, thick: float, is_named: bool) -> ET.Element:
    top = y + (16 if frame.above else 0)
    middle = top + thick / 2 + 4
    group = tag("g", data_bar=bar.name)
    if is_named and frame.above:
        group.append(label(frame.left, top - 4, bar.name))
    elif is_named:
        group.append(label(frame.left - 8, middle, bar.name, "end"))
    done = 0.0
    for piece in bar.pieces:
        if piece.value <= 0:
            continue
        x, after = frame.x(done), frame.x(done + piece.value)
        shape = rectangle(x, top, after - x, thick, f"piece {piece.class_}")
        if piece.count is not None:
            shape.set("data-bytes", str(piece.count))
        shape.append(tag("title", piece.text or f"{bar.name}: {bar.note}"))
        group.append(shape)
        done += piece.value
    return group


def _scale(frame: _Frame, bottom: float, width: float, axis: str) -> list[ET.Element]:
    shapes = [line(frame.left, bottom, frame.right, bottom, "axis")]
    for value in ticks(0.0, frame.largest, int((frame.right - frame.left) / 60)):
        x = frame.x(value)
        shapes += [
            line(x, frame.top, x, bottom, "grid"),
            label(x, bottom + 14, f"{value:,.6g}", "middle" if x > 14 else "start", "tick"),
        ]
    shapes.append(label(width - 2, bottom + 30, axis, "end", "tick"))
    return shapes


def _limit(frame: _Frame, limit: Limit, bottom: float, width: float) -> list[ET.Element]:
    x, wide = frame.x(limit.value), text_px(limit.text)
    at, anchor = (x, "middle")
    if x + wide / 2 > width - 2:
        at, anchor = width - 2, "end"
    if x - wide / 2 < 2:
        at, anchor = 2.0, "start"
    return [line(x, frame.top - 4, x, bottom, "limit"), label(at, 12, limit.text, anchor, "limit-text")]
