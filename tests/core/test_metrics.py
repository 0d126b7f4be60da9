"""What a run says about itself."""

from __future__ import annotations

import json
import os
import pty
import sys
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpctrain.core.metrics import Deferred, Meter, Reporter, curve
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


def make_record(step, loss=2.5, **more):
    facts = {"epoch": 0, "lr": 0.01, "grad_norm": 1.5, "samples_per_s": 123.4, "data_wait": 0.25}
    return {"step": step, "loss": loss, "memory_gib": 0.5, **facts, **more}


def open_reporter(folder, attempt="1_0_0", num_steps=40, first_step=0):
    return Reporter(folder / "metrics.jsonl", folder / "tensorboard", attempt, num_steps, first_step)


def read_records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_deferred_numbers_come_out_in_order_with_their_records():
    deferred = Deferred(CPU)
    assert deferred.ready() == []
    deferred.push({"step": 1}, {"loss": torch.tensor(0.5)})
    deferred.push({"step": 2}, {"loss": torch.tensor(0.25)})
    assert deferred.ready(wait=True) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    assert deferred.ready() == []


class Event:
    """A CUDA event whose copy has not arrived."""

    def __init__(self):
        self.arrived = False

    def query(self):
        return self.arrived

    def synchronize(self):
        self.arrived = True


def test_a_number_that_has_not_arrived_holds_back_the_later_ones_and_nobody_waits():
    deferred = Deferred(CPU)
    deferred.push({"step": 1}, {"loss": torch.tensor(0.5)})
    deferred.push({"step": 2}, {"loss": torch.tensor(0.25)})
    record, copies, _ = deferred._waiting[0]
    deferred._waiting[0] = (record, copies, Event())
    assert deferred.ready() == []
    assert [each["step"] for each in deferred.ready(wait=True)] == [1, 2]


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_rates_count_what_happened_since_the_last_report(clock):
    meter = Meter(flops_per_sample=6e9, peak_flops=2e12, world_size=4)
    meter.add(300)
    meter.add(100)
    clock[0] += 2.0
    facts = meter.report(0.5, CPU)
    assert facts["samples_per_s"] == 200.0
    assert facts["data_wait"] == 0.25
    assert facts["mfu"] == pytest.approx(200 * 6e9 / (4 * 2e12))  # rate × FLOPs / (ranks × peak)
    assert 0.01 < facts["memory_gib"] < 100
    meter.add(50)
    clock[0] += 1.0
    facts = meter.report(0.6, CPU)
    assert (facts["samples_per_s"], facts["data_wait"]) == (50.0, pytest.approx(0.1))


def test_an_evaluation_between_two_reports_does_not_count(clock):
    meter = Meter(flops_per_sample=None, peak_flops=None, world_size=1)
    clock[0] += 100.0
    meter.restart(7.0)
    meter.add(10)
    clock[0] += 1.0
    facts = meter.report(7.0, CPU)
    assert (facts["samples_per_s"], facts["data_wait"]) == (10.0, 0.0)
    assert "mfu" not in facts


def test_records_go_to_jsonl_tensorboard_and_plain_lines(tmp_path, capsys):
    reporter = open_reporter(tmp_path)
    reporter.train(make_record(10, 3.0, mfu=0.333))
    reporter.evaluation({"step": 10, "epoch": 1, "rank1": 0.75})
    reporter.train(make_record(20, float("nan")))
    reporter.close()
    first, evaluation, broken = read_records(tmp_path)
    assert first.items() >= {"kind": "train", "attempt": "1_0_0", "num_steps": 40, "loss": 3.0}.items()
    assert evaluation.items() >= {"kind": "eval", "step": 10, "rank1": 0.75}.items()
    assert broken["loss"] == "nan"  # JSON has no NaN
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "step 10/40  epoch 0  loss 3.0000  lr 1.00e-02  norm 1.50  "
        "123.4 samples/s  wait 25%  0.5 GiB  mfu 33.3%"
    )
    assert lines[1] == "eval  step 10  rank1 0.7500"
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("eval/rank1")] == [(10, 0.75)]
    assert [e.step for e in events.Scalars("train/loss")] == [10, 20]


def test_a_diverged_run_still_closes_its_reports(tmp_path, capsys):
    reporter = open_reporter(tmp_path)
    for step, loss in ((10, 3.0), (20, float("nan")), (30, float("inf"))):
        reporter.train(make_record(step, loss))
    reporter.close()
    assert "loss 3.000" in capsys.readouterr().out


def test_steps_that_are_done_again_appear_once_in_tensorboard(tmp_path, capsys):
    for attempt, first_step, steps in (("1_0_0", 0, (10, 20, 30)), ("1_1_0", 15, (20, 30, 40))):
        reporter = open_reporter(tmp_path, attempt, first_step=first_step)
        for step in steps:
            reporter.train(make_record(step, float(step + first_step)))
        reporter.close()
    assert len(read_records(tmp_path)) == 6
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert found == [(10, 10.0), (20, 35.0), (30, 45.0), (40, 55.0)]


def test_a_terminal_gets_a_bar_with_the_last_numbers(tmp_path):
    def report(rank, world):
        master, slave = pty.openpty()
        os.dup2(slave, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  the terminal, as in a shell
        os.environ |= {"TERM": "xterm", "COLUMNS": "160"}
        reporter = open_reporter(tmp_path, first_step=10)
        reporter.train(make_record(20))
        reporter.evaluation({"step": 20, "epoch": 1, "rank1": 0.75})
        reporter.train(make_record(40, 1.25))
        reporter.close()
        sys.stdout.flush()
        os.close(slave)
        os.set_blocking(master, False)
        return os.read(master, 1 << 20).decode()

    (shown,) = run_ranks(1, report)
    assert "40/40" in shown and "loss 1.250  123/s  wait 25%" in shown
    assert "eval  step 20  rank1 0.7500" in shown
    assert "\x1b[?25h" in shown  # the cursor is back
    assert "loss 2.500 █▁ 1.250   steps 20–40" in shown


def test_the_curve_goes_from_the_highest_to_the_lowest_block():
    points = [(step, 8.0 - step) for step in range(8)]
    assert curve(points) == "loss 8.000 █▇▆▅▄▃▂▁ 1.000   steps 0–7"
    assert curve([(0, 1.0), (1, 1.0)]) == "loss 1.000 ▁▁ 1.000   steps 0–1"


def test_a_long_curve_is_averaged_to_the_width():
    shown = curve([(step, float(step // 10)) for step in range(40)], width=4)
    assert shown == "loss 0.000 ▁▃▆█ 3.000   steps 0–39"
