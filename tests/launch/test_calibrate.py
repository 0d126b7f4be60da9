"""`hpctrain calibrate` without Slurm: two ranks here, a file of figures, and what the file keeps."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.cli import compose
from hpctrain.config.hardware import Hardware, find_hardware, parse_hardware, save_hardware
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError, RunError
from hpctrain.launch import calibrate as verb
from hpctrain.launch.submit import Submitted
from hpctrain.plan.calibration import Calibration, Row
from hpctrain.run.directory import RunDirectory
from tests.helpers.runs import ROOT

# Measured shortly: what is shown here is the way of the times, not the times.
QUICK = """
import sys
if "hpctrain.launch.rank" in " ".join(sys.orig_argv):
    from hpctrain.core import measure
    measure.TARGET_S, measure.REPEATS = 0.001, 2
"""
PLACE = {"date": "2026-01-02", "job": None, "nodes": 1, "ranks_per_node": 2, "torch": "2.14.1"}
PLACE |= {"device": "CPU", "precision": "bf16", "peak": "bf16_tflops"}


def make_config(*overrides: str) -> Config:
    (point,) = compose(["+exp=calibrate", *overrides])
    return point.resolve()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A calibration of two ranks; the home folder in which it was made, and its exit code."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "sitecustomize.py").write_text(QUICK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
        patch.chdir(folder)
        yield folder, verb.calibrate(make_config(), None, as_json=True)


def test_a_calibration_writes_the_figures_that_plans_read(calibrated: tuple[Path, int]) -> None:
    folder, code = calibrated
    hardware = find_hardware("cpu")
    assert code == 0
    assert (folder / ".config/hpctrain/cluster/hardware/cpu.yaml").is_file()
    others = {name for name, figure in hardware.figures.items() if figure.kind != "measured"}
    assert others == {"requeue_s"}  # the shipped file's only figure
    wanted = {"fp32_tflops", "matmul_efficiency", "attention_efficiency", "convnet_efficiency"}
    wanted |= {"transformer_efficiency", "launch_us", "memory_gbps", "host_memory_gbps", "node2_gbps"}
    wanted |= {"send_gbps", "overlap", "storage_gbps", "write_gbps", "decode_ms_per_megapixel"}
    assert wanted <= set(hardware.figures)


def test_what_is_measured_is_what_a_computer_can_be(calibrated: tuple[Path, int]) -> None:
    hardware = find_hardware("cpu")
    ranges = {
        "fp32_tflops": (1e-3, 10),
        "matmul_efficiency": (0.02, 2),
        "convnet_efficiency": (0.02, 2),
        "overlap": (0.01, 1),
        "memory_gbps": (0.1, 1000),
        "node2_gbps": (0.005, 100),
        "storage_gbps": (0.005, 100),
        "decode_ms_per_megapixel": (0.5, 100),
        "launch_us": (0.5, 1000),
    }
    outside = {
        name: hardware[name] for name, (low, high) in ranges.items() if not low <= hardware[name] <= high
    }
    assert outside == {}


def test_the_times_are_kept_and_no_path_of_the_host_is_in_the_figures(calibrated: tuple[Path, int]) -> None:
    folder, _ = calibrated
    run = RunDirectory(folder / "runs" / "calibrate-1")
    calibration = Calibration.from_dict(json.loads(run.calibration.read_text()))
    assert {row.what for row in calibration.of("send", "all_reduce", "all_gather", "reduce_scatter")} == {
        *("send", "all_reduce", "all_gather", "reduce_scatter")
    }
    text = (folder / ".config/hpctrain/cluster/hardware/cpu.yaml").read_text()
    assert "/" not in text.partition("\n")[2]
    assert "no job, 1 nodes x 2 ranks" in text


def test_ranks_on_a_cpu_have_no_memory_of_their_own(calibrated: tuple[Path, int]) -> None:
    """What is free now, over the ranks of now, would refuse runs at other times and of other ranks."""
    hardware = find_hardware("cpu")
    assert "usable_gib" not in hardware and "memory_gib" not in hardware
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert hardware["host_memory_gib"] == pytest.approx(host, rel=0.01)


def test_nothing_that_was_written_to_be_read_back_stays_in_the_run_folder(
    calibrated: tuple[Path, int],
) -> None:
    folder, _ = calibrated
    assert not (folder / "runs" / "calibrate-1" / "calibration").exists()


def test_the_name_of_a_calibration_picks_its_result_up_without_measuring_again(
    calibrated: tuple[Path, int],
) -> None:
    folder, _ = calibrated
    figures = folder / ".config/hpctrain/cluster/hardware/cpu.yaml"
    times = RunDirectory(folder / "runs" / "calibrate-1").calibration
    written, measured_ns = figures.read_text(), times.stat().st_mtime_ns
    figures.unlink()
    assert verb.calibrate(make_config("name=calibrate-1"), None, as_json=True) == 0
    assert figures.read_text() == written and times.stat().st_mtime_ns == measured_ns


def test_who_stops_waiting_is_told_how_to_pick_the_result_up(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(job: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        verb, "submit", lambda *_: Submitted(RunDirectory(home / "runs/calibrate-1"), "7", "")
    )
    monkeypatch.setattr("hpctrain.slurm.job", press)
    with pytest.raises(KeyboardInterrupt):
        verb.calibrate(make_config(), None, as_json=False)
    assert re.search("job 7 goes on.*`hpctrain calibrate name=calibrate-1`", capsys.readouterr().err)


@pytest.mark.parametrize("name", [None, "cpu"])
def test_figures_of_gpus_do_not_go_into_the_file_of_machines_without(home: Path, name: str | None) -> None:
    config = make_config("cluster.device=cuda")
    assert config.cluster.hardware == "cpu"
    with pytest.raises(ConfigError, match="--name NAME"):
        verb.calibrate(config, name, as_json=False)
    assert not (home / "runs").exists()


def test_what_was_measured_on_a_cpu_is_not_kept_for_gpus(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = parse_hardware("cpu", "node2_gbps: {value: 1.2, kind: measured, source: job 7}", "")
    save_hardware(Hardware("cpu", {**find_hardware("cpu").figures, **measured.figures}))
    run = RunDirectory(home / "runs" / "calibrate-1")
    run.path.mkdir(parents=True)
    run.calibration.write_text(json.dumps(Calibration(PLACE, [Row("read", 1e9, [0.5])]).to_dict()))
    monkeypatch.setattr(verb, "carry_out", lambda config: (run, "8"))
    assert verb.calibrate(make_config("cluster.device=cuda"), "mine", as_json=True) == 0
    assert set(find_hardware("mine").figures) == {"requeue_s", "storage_gbps", "storage_total_gbps"}


def test_what_was_not_measured_keeps_its_value_kind_and_source() -> None:
    before = find_hardware("rtx4090")
    calibration = Calibration(PLACE, [Row("read", 1e9, [0.5]), Row("matmul", 1e12, [0.01])])
    after = verb.calibrated("mine", before, calibration)
    changed = {name for name in before.figures if after.figures[name] != before.figures[name]}
    assert changed == {"storage_gbps"}
    assert after["bf16_tflops"] == 165.2 and after.figures["bf16_tflops"].kind == "data_sheet"


def test_one_node_tells_a_file_servers_limit_only_where_nobody_else_does() -> None:
    calibration = Calibration(PLACE, [Row("read", 1e9, [0.5])])
    assert verb.calibrated("mine", Hardware("cpu", {}), calibration)["storage_total_gbps"] == 2.0
    assert verb.calibrated("mine", find_hardware("rtx4090"), calibration)["storage_total_gbps"] == 4.0


def test_the_table_shows_each_figure_before_and_after() -> None:
    calibration = Calibration(PLACE, [Row("read", 1e9, [0.5])])
    before = find_hardware("rtx4090")
    lines = verb.text(before, verb.calibrated("mine", before, calibration), calibration).splitlines()
    (line,) = [line.split() for line in lines if line.startswith("  storage_gbps")]
    assert line[:4] == ["storage_gbps", "2", "guess", "2"]
    assert lines[-1].startswith("  not measured, as before: bf16_tflops")


def test_a_saved_file_reads_back_equal_and_is_read_at_once(home: Path) -> None:
    hardware = find_hardware("rtx4090")
    changed = hardware.with_value("overlap", 0.5)
    save_hardware(changed)
    assert find_hardware("rtx4090") == changed != hardware


def test_a_name_that_is_no_file_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.\./mine"):
        verb.calibrate(make_config(), "../mine", as_json=False)
    assert not (home / "runs").exists()


def test_a_run_that_leaves_no_times_writes_no_figures(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(home / "runs" / "calibrate-1")
    monkeypatch.setattr(verb, "submit", lambda config, plan: Submitted(run, None, "is not done"))
    with pytest.raises(RunError, match="left no times"):
        verb.calibrate(make_config(), None, as_json=False)
    assert not (home / ".config").exists()
