"""Numbers in words, and round numbers on scales."""

from __future__ import annotations

import pytest

from hpctrain.plan.durations import range_text
from hpctrain.plan.uncertainty import Interval
from hpctrain.report.markup import ticks
from hpctrain.report.words import gib_text, numbers_text, seconds_text, unit_of


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00005, "50 µs"),
        (0.325, "325 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (14.71, "14.7 s"),
        (1010.4, "1,010 s"),
        (0.0, "0 s"),
    ],
)
def test_seconds_have_a_unit_of_their_size(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_numbers_in_a_row_are_told_as_one() -> None:
    assert numbers_text([1, 2, 3, 5, 7, 8]) == "1–3, 5, 7–8"
    assert numbers_text([]) == ""


def test_a_range_has_the_unit_of_its_middle() -> None:
    day = 86400.0
    assert range_text(Interval(2.7 * day, 3.1 * day, 4 * day)) == ("3.1 days", "2.7–4.0 days")
    assert range_text(Interval(36 * 3600, 40 * 3600, 80 * 3600)) == ("40.0 h", "36.0–80.0 h")
    assert range_text(Interval(60, 120, 7300)) == ("2 min", "1–122 min")


def test_memory_below_a_gibibyte_is_told_in_mebibytes() -> None:
    assert (gib_text(2**30 * 3 // 2), gib_text(2**27)) == ("1.5 GiB", "128 MiB")


def test_units_come_from_names_of_figures() -> None:
    names = "bf16_tflops", "network_gbps", "decode_ms_per_megapixel", "decode_ms", "requeue_s", "overlap"
    assert [unit_of(name) for name in names] == [" TFLOP/s", " GB/s", " ms/megapixel", " ms", " s", ""]


def test_ticks_are_round_and_within() -> None:
    assert ticks(0, 22.6, 12) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22]
    assert ticks(0, 22.6, 6) == [0, 5, 10, 15, 20]
    assert ticks(113.2, 122.4, 3) == [115, 120]
    assert ticks(0.0, 0.3, 3) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert ticks(5, 5, 3) == [5]
