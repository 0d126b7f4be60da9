"""Figures of devices: every shipped one is known, in range, and says where it is from."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.hardware import (
    FIGURES,
    find_hardware,
    hardware_folders,
    known_hardware,
    parse_hardware,
    save_hardware,
)
from hpctrain.errors import ConfigError


@pytest.mark.parametrize("name", [name for name in known_hardware() if name != "cpu"])
def test_every_gpu_has_every_figure_with_a_source(name: str) -> None:
    hardware = find_hardware(name)
    assert set(FIGURES) - set(hardware.figures) <= {"fp16_accumulation_efficiency"}  # else as with fp32 sums
    assert all(len(figure.source) > 3 for figure in hardware.figures.values())


@pytest.mark.parametrize(
    ("name", "bf16_tflops", "memory_gbps"),
    [
        ("rtx4090", 165.2, 1008),
        ("rtx3090", 71, 936),
        ("a100", 312, 2039),
        ("h100", 989.4, 3350),
        ("h200", 989.4, 4800),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name: str, bf16_tflops: float, memory_gbps: float) -> None:
    hardware = find_hardware(name)
    assert (hardware["bf16_tflops"], hardware["memory_gbps"]) == (bf16_tflops, memory_gbps)


def test_the_users_own_file_is_read_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    own = hardware_folders()[0]
    own.mkdir(parents=True)
    (own / "rtx4090.yaml").write_text("node8_gbps: {value: 2.5, kind: measured, source: job 7}\n")
    assert find_hardware("rtx4090")["node8_gbps"] == 2.5 and "bf16_tflops" not in find_hardware("rtx4090")


def test_single_figures_can_be_replaced() -> None:
    fast = find_hardware("rtx4090", {"network_gbps": 11.0})
    assert fast["network_gbps"] == 11.0 and find_hardware("rtx4090")["network_gbps"] != 11.0
    with pytest.raises(ConfigError, match=r"cluster\.figures\.netwrk_gbps=11\.0\n.*nearest: network_gbps$"):
        find_hardware("rtx4090", {"netwrk_gbps": 11.0})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bf16_tflop: {value: 1, kind: guess, source: x}", "bf16_tflop is no figure; nearest: bf16_tflops$"),
        ("bf16_tflops: {value: 1, kind: hearsay, source: x}", "kind hearsay"),
        ("bf16_tflops: {value: 1, low: 2, kind: guess, source: x}", "does not hold"),
        ("bf16_tflops: {value: -1, kind: guess, source: x}", "-1, but a figure is positive"),
        ("bf16_tflops: {value: .nan, kind: guess, source: x}", "nan, but a figure is .* finite"),
        ("bf16_tflops: {value: 1, high: .inf, kind: guess, source: x}", "inf, but a figure is .* finite"),
        ("bf16_tflops: {value: 1e3, kind: guess, source: x}", r"'1e3' is no number, such as .* 1\.0e\+3"),
        ("bf16_tflops: {value: true, kind: guess, source: x}", "True is no number"),
        ("bf16_tflops: {value: [1], kind: guess, source: x}", "a list is no number"),
        ("bf16_tflops: {value: 1, kind: guess}", "bf16_tflops: no source"),
        ("bf16_tflops: {kind: guess, source: 7}", "bf16_tflops: no value"),
        ("bf16_tflops: {value: 1, kind: guess, source: 7}", "source 7 is no text"),
        (
            "bf16_tflops: {value: 1, hihg: 2, kind: guess, source: x}",
            "hihg is no part of a figure; nearest: high",
        ),
        ("bf16_tflops: 165", "bf16_tflops: 165 in place of {value"),
        ("bf16_tflops:", "bf16_tflops: nothing in place of {value"),
        ("- bf16_tflops", "it is a list, no table of figures"),
        ("{}\n[", "no YAML: line 2: "),
        ("overlap: {value: 5, kind: guess, source: x}", "overlap: 5, but it is a share, and at most 1$"),
        ("matmul_efficiency: {value: 40, kind: guess, source: x}", "40, but it is a share, and at most 1.5$"),
        ("overlap: {value: 0.9, high: 1.1, kind: guess, source: x}", "overlap: 1.1, but it is a share"),
    ],
)
def test_what_is_no_figure_is_refused_in_plain_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_hardware("mine", text, "mine.yaml")
    assert "mine.yaml" in refused.value.asked and refused.value.change.startswith("value, kind and source")
    assert re.search(words, refused.value.found)
    assert not re.search("argument|object|str and|instances|_figure", refused.value.found)


def test_a_card_may_be_faster_than_its_data_sheet_but_hides_no_more_than_all() -> None:
    """Calibrations of convolutions reached 1.07 of a peak; all of a communication hides at most."""
    text = "{n}: {{value: {v}, kind: measured, source: x}}"
    assert parse_hardware("mine", text.format(n="matmul_efficiency", v=1.07), "")["matmul_efficiency"] == 1.07
    assert parse_hardware("mine", text.format(n="overlap", v=1), "")["overlap"] == 1


@pytest.mark.parametrize(
    ("figure", "value"),
    [("overlap", 5.0), ("matmul_efficiency", 40.0), ("memory_gbps", math.nan), ("memory_gbps", math.inf)],
)
def test_a_single_figure_that_cannot_be_is_refused(figure: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.figures\.{figure}={value}"):
        find_hardware("rtx4090", {figure: value})


def test_a_file_that_is_no_text_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    own = hardware_folders()[0]
    own.mkdir(parents=True)
    (own / "mine.yaml").write_bytes("# Café\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"mine\.yaml\n.*not UTF-8: byte 0xe9 at 5"):
        find_hardware("mine")


def test_a_file_is_saved_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full when the file is half written leaves the old one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    old = find_hardware("rtx4090").with_value("overlap", 0.5)
    path = save_hardware(old)
    before = path.read_bytes()

    def fill(self: Path, text: str, **_: Any) -> int:
        with self.open("w") as handle:
            handle.write(text[:100])
        raise OSError("No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", fill)
        with pytest.raises(OSError, match="No space"):
            save_hardware(old.with_value("overlap", 0.25))
    assert path.read_bytes() == before and find_hardware("rtx4090")["overlap"] == 0.5
    save_hardware(old.with_value("overlap", 0.25))
    assert find_hardware("rtx4090")["overlap"] == 0.25 and list(path.parent.glob("*.yaml")) == [path]
