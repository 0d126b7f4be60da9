"""A run's state, read from ledgers written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.report import verbs
from hpctrain.report.status import line, make_status, text, to_json
from hpctrain.run.directory import RunDirectory, write_json
from hpctrain.run.ledger import Ledger


def make_run(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    run.create()
    run.config.write_text("")
    return run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """An empty run, on a machine without Slurm."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "runs" / "city")


def write_attempt(run: RunDirectory, name: str, end: dict[str, Any] | None, **steps: int | None) -> None:
    ledger = Ledger(run.ledger)
    ledger.append("start", attempt=name, nodes=["n0", "n1"], num_ranks=16, restart=0, job="12")
    if steps.get("restored") is not None:
        ledger.append("restored", attempt=name, step=steps["restored"])
    if steps.get("saved") is not None:
        ledger.append("saved", attempt=name, step=steps["saved"])
    if end:
        ledger.append(
            "end", attempt=name, **{"message": "", "rank": None, "last_step": None, "reason": "", **end}
        )


def write_metrics(run: RunDirectory, *records: dict[str, Any]) -> None:
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))


TRAIN = {"kind": "train", "step": 40, "num_steps": 60, "loss": 1.25, "samples_per_s": 123.4}


ENDS = [
    ({"cause": "crash", "decision": "fail"}, "FAILED"),
    ({"cause": "stop_file", "decision": "stop"}, "STOPPED"),
    ({"cause": "preemption", "decision": "stop", "reason": "interrupted"}, "STOPPED"),
    ({"cause": "preemption", "decision": "stop", "reason": "the job was cancelled"}, "CANCELLED"),
    ({"cause": "preemption", "decision": "leave"}, "INTERRUPTED"),
    (None, "INTERRUPTED"),
]


@pytest.mark.parametrize(("end", "state"), ENDS, ids=str)
def test_the_last_end_tells_the_state(end: dict[str, Any] | None, state: str, run: RunDirectory) -> None:
    write_attempt(run, "12_0_1", {"cause": "crash", "decision": "relaunch"})
    write_attempt(run, "12_0_2", end)
    assert make_status(run).state == state


def test_a_run_without_a_start_is_new(run: RunDirectory) -> None:
    assert make_status(run).state == "NEW"
    Ledger(run.ledger).append("submitted", job=None)
    assert make_status(run).state == "NEW"


def test_done_wins_over_whatever_the_ledger_says(run: RunDirectory) -> None:
    write_attempt(run, "12_0_1", {"cause": "crash", "decision": "fail"})
    run.done.touch()
    assert make_status(run).state == "COMPLETED"


def test_steps_throughput_and_saves_come_from_metrics_and_ledger(run: RunDirectory) -> None:
    write_attempt(run, "12_0_1", {"cause": "preemption", "decision": "requeue", "last_step": 30}, saved=30)
    write_attempt(run, "12_1_1", None, restored=30, saved=35)
    write_metrics(run, {**TRAIN, "step": 39}, {"kind": "eval", "step": 35, "tar": 0.75}, TRAIN)
    status = make_status(run)
    assert (status.step, status.num_steps, status.saved_step, status.samples_per_s) == (40, 60, 35, 123.4)
    assert status.evaluation["tar"] == 0.75
    assert [attempt["restored_step"] for attempt in status.attempts] == [None, 30]


def test_a_torn_line_of_metrics_is_skipped(run: RunDirectory) -> None:
    write_metrics(run, TRAIN)
    with run.metrics.open("a") as handle:
        handle.write('{"kind": "train", "ste')
    assert make_status(run).step == 40


def test_text_says_where_how_far_and_why(run: RunDirectory) -> None:
    write_attempt(run, "12_0_1", {"cause": "crash", "decision": "relaunch", "last_step": 7}, saved=5)
    write_attempt(
        run,
        "12_0_2",
        {
            "cause": "crash",
            "decision": "fail",
            "message": "ValueError: loss is nan",
            "reason": "budget.crash=2 is used up",
            "last_step": 9,
        },
        restored=5,
    )
    write_metrics(run, TRAIN, {"kind": "eval", "step": 35, "time": 1.5, "tar": 0.75})
    shown = text(make_status(run))
    for words in (
        "city  FAILED",
        str(run.path),
        "40 of 60",
        "saved at 5",
        "123.4 samples/s",
        "loss      1.2500 at step 40",
        "tar 0.7500 (step 35)",
        "12_0_1: steps 0–7, saved 5; crash → relaunch",
        "12_0_2: steps 5–9, nothing saved; crash → fail",
        "why       ValueError: loss is nan (budget.crash=2 is used up)",
    ):
        assert words in shown, shown


def test_json_holds_the_same_facts(run: RunDirectory) -> None:
    write_attempt(run, "12_0_1", {"cause": "crash", "decision": "fail", "message": "broken"}, saved=5)
    facts = json.loads(to_json(make_status(run)))
    assert (facts["run"], facts["state"], facts["saved_step"], facts["cause"]) == (
        "city",
        "FAILED",
        5,
        "broken",
    )
    assert facts["attempts"][0]["nodes"] == ["n0", "n1"]


def test_a_sweep_has_a_line_per_point(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Path("runs") / "grid.sweep"
    good, bad = make_run(sweep / "lr=1"), make_run(sweep / "lr=2")
    good.done.touch()
    write_metrics(good, TRAIN)
    write_attempt(bad, "12-1_0_1", {"cause": "crash", "decision": "fail", "message": "loss is nan"})
    write_json(sweep / "sweep.json", {"points": {"lr=1": {"job": "12_0"}, "lr=2": {"job": "12_1"}}})
    for name in ("grid", "grid.sweep", str(sweep.resolve())):
        verbs.show_status(name, as_json=False)
        first, second = capsys.readouterr().out.splitlines()
        assert first.split()[:3] == ["COMPLETED", "40/60", "lr=1"]
        assert second.startswith("FAILED") and "lr=2" in second and second.endswith("loss is nan")
    verbs.show_status("grid", as_json=True)
    assert [point["state"] for point in json.loads(capsys.readouterr().out)] == ["COMPLETED", "FAILED"]


def test_logs_show_one_rank_over_all_attempts(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for attempt, rank, words in (
        ("12_0_1", 0, "first\n"),
        ("12_0_1", 1, "other\n"),
        ("12_1_1", 0, "second\n"),
    ):
        (run.logs / f"{attempt}_{rank}.log").write_text(words)
    verbs.show_logs(run, rank=0, follow=False, as_json=False)
    assert capsys.readouterr().out.splitlines() == ["--- 12_0_1_0.log", "first", "--- 12_1_1_0.log", "second"]
    verbs.show_logs(run, rank=10, follow=False, as_json=False)
    assert "rank 10 has printed nothing yet" in capsys.readouterr().err


def test_following_logs_ends_with_the_run(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    (run.logs / "12_0_1_0.log").write_text("all of it\n")
    run.done.touch()
    verbs.show_logs(run, rank=0, follow=True, as_json=False)
    assert "all of it" in capsys.readouterr().out


def test_line_pads_so_that_points_align(run: RunDirectory) -> None:
    assert line(make_status(run)).startswith("NEW          0")
