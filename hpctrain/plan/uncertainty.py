"""How the ranges of figures make the range of a prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.config.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Interval:
    """A prediction with its likely range."""

    low: float
    mid: float
    high: float

    def scaled(self, factor: float) -> Interval:
        return Interval(self.low * factor, self.mid * factor, self.high * factor)

    def text(self, digits: int = 3) -> str:
        """`38 (33–47)`, to so many significant digits."""
        mid, low, high = (_significant(value, digits) for value in (self.mid, self.low, self.high))
        return mid if low == high else f"{mid} ({low}–{high})"


def _significant(value: float, digits: int) -> str:
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e" in text or abs(value) >= 1000 else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """A figure whose range moves a prediction."""

    figure: str
    low: float
    high: float
    kind: str
    share: float  #: by how much of the prediction its range moves it

    def text(self) -> str:
        return f"{self.figure} {self.low:g}–{self.high:g} ({self.kind}) moves it by {self.share:.0%}"


def propagate(
    predict: Callable[[Hardware], float], hardware: Hardware
) -> tuple[Interval, tuple[Influence, ...]]:
    """A prediction's range, and the figures behind it, the most influential first.

    Each figure is moved to both ends of its range alone. The figures are taken as independent, so their
    squares add up, below and above separately (GUM, JCGM 100:2008, §5.1).
    """
    mid = predict(hardware)
    below = above = 0.0
    influences = []
    for name, figure in hardware.figures.items():
        if figure.low == figure.high:
            continue
        moved = [predict(hardware.with_value(name, value)) - mid for value in (figure.low, figure.high)]
        least, most = min(0.0, *moved), max(0.0, *moved)
        below, above = below + least**2, above + most**2
        if most - least > 0.01 * abs(mid):
            share = (most - least) / abs(mid)
            influences.append(
                Influence(figure=name, low=figure.low, high=figure.high, kind=figure.kind, share=share)
            )
    influences.sort(key=lambda influence: -influence.share)
    # Below, squares could add up to more than all of it.
    return Interval(max(mid - below**0.5, mid / 10), mid, mid + above**0.5), tuple(influences)
