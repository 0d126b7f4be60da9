"""Figures of devices: every shipped one is known, in range, and says where it is from."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.config.hardware import (
    FIGURES,
    find_hardware,
    hardware_folders,
    known_hardware,
    parse_hardware,
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
    with pytest.raises(ConfigError, match=r"cluster\.figures\.netwrk_gbps"):
        find_hardware("rtx4090", {"netwrk_gbps": 11.0})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bf16_tflop: {value: 1, kind: guess, source: x}", "bf16_tflop is no figure"),
        ("bf16_tflops: {value: 1, kind: hearsay, source: x}", "kind hearsay"),
        ("bf16_tflops: {value: 1, low: 2, kind: guess, source: x}", "does not hold"),
        ("bf16_tflops: {value: -1, kind: guess, source: x}", "does not hold"),
        ("bf16_tflops: {value: 1, kind: guess}", "source"),
        ("bf16_tflops: 165", "value, kind and source"),
        ("[", "value, kind and source"),
    ],
)
def test_what_is_no_figure_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_hardware("mine", text, "mine.yaml")
