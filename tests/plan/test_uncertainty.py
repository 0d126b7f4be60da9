"""Ranges of predictions from ranges of figures, against sums by hand."""

from __future__ import annotations

import pytest

from hpctrain.config.hardware import Figure, Hardware
from hpctrain.plan.uncertainty import Interval, propagate


def device(**ranges: tuple[float, float, float]) -> Hardware:
    return Hardware(
        "test",
        {
            name: Figure(value=value, low=low, high=high, kind="guess", source="a test")
            for name, (low, value, high) in ranges.items()
        },
    )


def test_independent_ranges_add_up_as_squares() -> None:
    interval, _ = propagate(lambda d: d["a"] + d["b"], device(a=(7, 10, 13), b=(16, 20, 24)))
    assert interval == Interval(25.0, 30.0, 35.0)  # 3 and 4 make 5


def test_a_figure_in_the_denominator_widens_the_other_side() -> None:
    interval, _ = propagate(lambda d: 100 / d["gbps"], device(gbps=(5, 10, 20)))
    assert interval == Interval(5.0, 10.0, 20.0)


def test_certain_figures_leave_a_point() -> None:
    interval, influences = propagate(lambda d: d["a"] * 2, device(a=(3, 3, 3)))
    assert (interval.low, interval.mid, interval.high) == (6, 6, 6) and influences == ()


def test_the_most_influential_figure_comes_first_and_small_ones_are_not_named() -> None:
    _, influences = propagate(
        lambda d: d["a"] + d["b"] + d["c"], device(a=(9, 10, 11), b=(40, 80, 90), c=(10, 10, 10.1))
    )
    assert [each.figure for each in influences] == ["b", "a"]
    assert influences[0].share == pytest.approx(0.5)  # 50 of 100


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(33.01, 38.2, 46.96), "38.2 (33–47)"),
        (Interval(5.0, 5.0, 5.0), "5"),
        (Interval(5754.0, 7123.0, 8119.0), "7,120 (5,750–8,120)"),
    ],
)
def test_an_interval_is_told_with_three_digits(interval: Interval, text: str) -> None:
    assert interval.text() == text
